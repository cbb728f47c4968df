"""Arithmetic on lanes of floats, in integers alone: section 8.6 of spec/tpde-format.md."""

from collections import namedtuple


class Format(namedtuple("Format", "X M bias infinities nans")):
    """`nans` has the lanes without sign that are NaN, of a format without infinities."""

    @property
    def top(self):
        return (1 << self.X) - 1

    def parts(self, u):
        """Sign, exponent and mantissa."""
        return u >> self.X + self.M, u >> self.M & self.top, u & (1 << self.M) - 1

    def is_nan(self, u):
        _, e, m = self.parts(u)
        return e == self.top and m != 0 if self.infinities else (e << self.M | m) in self.nans

    def is_infinite(self, u):
        _, e, m = self.parts(u)
        return self.infinities and e == self.top and m == 0

    def finite(self, u):
        """The magnitude n * 2^q, as n and q."""
        _, e, m = self.parts(u)
        if e == 0:
            return m, 1 - self.bias - self.M
        return m + (1 << self.M), e - self.bias - self.M


F32, BF16, F16 = Format(8, 23, 127, True, ()), Format(8, 7, 127, True, ()), Format(5, 10, 15, True, ())
F8_E5M2, F8_E4M3, E2M1 = Format(5, 2, 15, True, ()), Format(4, 3, 7, False, (0x7F,)), Format(2, 1, 1, False, ())
FORMATS = {"F32": F32, "BF16": BF16, "F16": F16, "F8_E5M2": F8_E5M2, "F8_E4M3": F8_E4M3}


def rounded(s, n, q, to):
    """The lane nearest to n * 2^q with sign `s`; ties to even."""
    sign = s << to.X + to.M
    if n == 0:
        return sign
    p = max(n.bit_length() - 1 + q, 1 - to.bias)
    k = q - (p - to.M)
    if k >= 0:
        r = n << k
    else:
        r = n >> -k
        rest, half = n - (r << -k), 1 << -k - 1
        r += rest > half or (rest == half and r & 1)
    return sign + min((p + to.bias - 1 << to.M) + r, to.top << to.M)


def cast(u, origin, to):
    s, _, m = origin.parts(u)
    if origin.is_nan(u):
        payload = m << to.M - origin.M if to.M >= origin.M else m >> origin.M - to.M
        return s << to.X + to.M | to.top << to.M | payload | 1 << to.M - 1
    if origin.is_infinite(u):
        return s << to.X + to.M | to.top << to.M
    return rounded(s, *origin.finite(u), to)


def product(u, v):
    """F8_E4M3 times F32, rounded to F32."""
    s, infinite = F8_E4M3.parts(u)[0] ^ F32.parts(v)[0], F32.is_infinite(v)
    (n_u, q_u), (n_v, q_v) = F8_E4M3.finite(u), F32.finite(v)
    if F8_E4M3.is_nan(u) or F32.is_nan(v) or (infinite and n_u == 0):
        return 0x7FC00000
    if infinite:
        return s << 31 | 0x7F800000
    return rounded(s, n_u * n_v, q_u + q_v, F32)


def microscaled(v, scale):
    """A nibble times 2^(scale - 127), as BF16."""
    n, q = E2M1.finite(v)
    return rounded(E2M1.parts(v)[0], n, q + scale - 127, BF16)
