// Errors, hashes, zstd frames, safetensors headers and files of the minimal consumers. An engine has most of these already.
// Section numbers are those of spec/tpde-format.md.
#pragma once
#include <blake3.h>
#include <tpde.h> // structs and constants of the format, in spec/
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>
using std::string, std::to_string;
using Bytes = std::string_view;

struct Failure { int exit_code; string text; };

inline string where; // the tensor and the chunk that are checked

inline void need(bool holds, const char* rule) { if (!holds) throw Failure{1, string("refused: ") + rule + where}; }
inline void need_scope(bool holds, const string& what) { if (!holds) throw Failure{3, "out of scope: " + what + where}; }
inline void need_system(bool holds, const string& what) { if (!holds) throw Failure{2, what + ": " + strerror(errno)}; }

// ---- Bytes ----

inline uint64_t align(uint64_t x, uint64_t a) { return (x + a - 1) / a * a; }
inline bool is_zero(Bytes bytes) { return bytes.find_first_not_of('\0') == Bytes::npos; }

// Element i of an array of structs. The caller knows that it exists.
template <class T> T at(Bytes array, uint64_t i = 0) {
    T value;
    memcpy(&value, array.data() + i * sizeof(T), sizeof(T));
    return value;
}

inline Bytes take(Bytes& rest, uint64_t size, const char* rule) {
    need(size <= rest.size(), rule);
    const Bytes piece = rest.substr(0, size);
    rest.remove_prefix(size);
    return piece;
}

inline string blake3(Bytes bytes, size_t size = BLAKE3_OUT_LEN) {
    string hash(size, 0);
    blake3_hasher hasher;
    blake3_hasher_init(&hasher);
    blake3_hasher_update(&hasher, bytes.data(), bytes.size());
    blake3_hasher_finalize(&hasher, (uint8_t*)hash.data(), size);
    return hash;
}

// Section 5.2: the content of one zstd frame.
inline string expand(Bytes frame, uint64_t size) {
    need(frame.size() >= 6 && at<uint32_t>(frame) == ZSTD_MAGICNUMBER, "section.frame");
    uint64_t window = frame[4] & 0x20 ? size : uint64_t(8 + (frame[5] & 7)) << (7 + (uint8_t(frame[5]) >> 3));
    need(window <= TPDE_WINDOW_SIZE_MAX && ZSTD_getDictID_fromFrame(frame.data(), frame.size()) == 0, "section.frame");
    need(ZSTD_getFrameContentSize(frame.data(), frame.size()) == size, "section.frame");
    need(ZSTD_findFrameCompressedSize(frame.data(), frame.size()) == frame.size(), "section.frame");
    string content(size, 0);
    need(ZSTD_decompress(content.data(), size, frame.data(), frame.size()) == size, "section.frame");
    return content;
}

inline bool is_utf8(Bytes text) {
    while (!text.empty()) {
        const uint8_t byte = text[0];
        const uint32_t size = byte < 0x80 ? 1 : byte >> 5 == 6 ? 2 : byte >> 4 == 14 ? 3 : byte >> 3 == 30 ? 4 : 5;
        if (size > 4 || size > text.size()) return false;
        uint32_t code = size == 1 ? byte : byte & 0x7F >> size;
        for (uint32_t i = 1; i < size; i++) {
            if ((text[i] & 0xC0) != 0x80) return false;
            code = code << 6 | (text[i] & 0x3F);
        }
        const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
        if (code < least[size] || code > 0x10FFFF || code >> 11 == 0x1B) return false; // too long, too large, a surrogate
        text.remove_prefix(size);
    }
    return true;
}

inline bool is_name(Bytes name) { return is_utf8(name) && name.find('\0') == Bytes::npos; } // section 8

inline uint32_t crc32(Bytes bytes) {
    uint32_t crc = ~0u;
    for (uint8_t byte : bytes) {
        crc ^= byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
    }
    return ~crc;
}

// The bytes of a file. Nobody may change the file while this program runs.
inline Bytes map_file(const string& path) {
    int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat facts;
    need_system(file >= 0 && fstat(file, &facts) == 0, path);
    need_scope(S_ISREG(facts.st_mode), "not a regular file: " + path);
    void* bytes = facts.st_size ? mmap(nullptr, facts.st_size, PROT_READ, MAP_PRIVATE, file, 0) : (void*)"";
    need_system(bytes != MAP_FAILED && close(file) == 0, path);
    return {(const char*)bytes, (size_t)facts.st_size};
}

// ---- Section 8.1: dtypes. Section 8: sizes of tensors ----

using Shape = std::vector<uint64_t>;
struct Dtype { uint32_t code; Bytes name; uint32_t bits, lane_bytes; };
inline const Dtype DTYPES[] = {
    {0, "BOOL", 8, 1}, {1, "U8", 8, 1}, {2, "I8", 8, 1}, {3, "U16", 16, 2}, {4, "I16", 16, 2}, {5, "U32", 32, 4}, {6, "I32", 32, 4},
    {7, "U64", 64, 8}, {8, "I64", 64, 8}, {16, "F16", 16, 2}, {17, "BF16", 16, 2}, {18, "F32", 32, 4}, {19, "F64", 64, 8},
    {20, "C64", 64, 4}, {32, "F8_E4M3", 8, 1}, {33, "F8_E5M2", 8, 1}, {34, "F8_E4M3FNUZ", 8, 1}, {35, "F8_E5M2FNUZ", 8, 1},
    {36, "F8_E8M0", 8, 1}, {48, "F4", 4, 1}, {49, "F6_E2M3", 6, 1}, {50, "F6_E3M2", 6, 1}};

template <class F> Dtype find_dtype(F is_it, const char* rule) {
    const Dtype* dtype = std::find_if(std::begin(DTYPES), std::end(DTYPES), is_it);
    need(dtype != std::end(DTYPES), rule);
    return *dtype;
}

inline uint64_t bytes_of(const Shape& shape, const Dtype& dtype, const char* rule) {
    if (std::count(shape.begin(), shape.end(), 0)) return 0;
    unsigned __int128 bits = dtype.bits;
    for (uint64_t dim : shape) need((bits *= dim) >> 63 == 0, rule);
    need(bits % 8 == 0, rule);
    return uint64_t(bits) / 8;
}

// ---- Section 10.3: headers of safetensors files ----

// The JSON that the profile allows. Each function takes one value.
struct Json {
    Bytes rest;
    const char* rule;

    void skip_space() { rest.remove_prefix(std::min(rest.find_first_not_of(" \t\n\r"), rest.size())); }
    char next() { return take(rest, 1, rule)[0]; }
    bool skip(char c) {
        skip_space();
        return !rest.empty() && rest[0] == c && next();
    }

    uint32_t code_unit() { // the four digits after \u
        const string digits(take(rest, 4, rule));
        need(digits.find_first_not_of("0123456789ABCDEFabcdef") == string::npos, rule);
        return uint32_t(strtoul(digits.c_str(), nullptr, 16));
    }

    string text() {
        string result;
        need(skip('"'), rule);
        for (char c; (c = next()) != '"';) {
            need(uint8_t(c) >= ' ', rule);
            if (c != '\\') {
                result += c;
                continue;
            }
            c = next();
            const size_t escape = Bytes("\"\\/bfnrt").find(c);
            if (escape != Bytes::npos) {
                result += "\"\\/\b\f\n\r\t"[escape];
                continue;
            }
            need(c == 'u', rule);
            uint32_t code = code_unit();
            if (code >> 10 == 0x36) { // half of a pair of surrogates
                need(next() == '\\' && next() == 'u', rule);
                const uint32_t low = code_unit();
                need(low >> 10 == 0x37, rule);
                code = 0x10000 + ((code & 0x3FF) << 10) + (low & 0x3FF);
            }
            need(code >> 10 != 0x37, rule);
            const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
            result += char(more == 0 ? code : (0xF0 << (3 - more) & 0xFF) | code >> 6 * more);
            for (int i = more; i-- > 0;) result += char(0x80 | (code >> 6 * i & 0x3F));
        }
        return result;
    }

    uint64_t integer() {
        skip_space();
        const string digits(take(rest, std::min(rest.find_first_not_of("0123456789"), rest.size()), rule));
        const uint64_t value = strtoull(digits.c_str(), nullptr, 10);
        need(digits == to_string(value), rule); // neither a leading zero nor more than 64 bits
        return value;
    }

    template <class F> void list(char begin, char end, F item) {
        need(skip(begin), rule);
        if (skip(end)) return;
        do item(); while (skip(','));
        need(skip(end), rule);
    }
    Shape integers() {
        Shape values;
        list('[', ']', [&] { values.push_back(integer()); });
        return values;
    }
    template <class F> void object(F member) {
        std::set<string> names;
        list('{', '}', [&] {
            const string name = text();
            need(names.insert(name).second && skip(':'), rule);
            member(name);
        });
    }
};

struct Placed { Dtype dtype; Shape shape; uint64_t begin, size; }; // begin counts from the end of the header
struct Head { std::map<string, Placed, std::less<>> tensors; uint64_t data_size = 0; };

// `head` is all bytes of a file before its data.
inline Head read_head(Bytes head, const char* rule) {
    need(head.size() >= 8 && at<uint64_t>(head) == head.size() - 8 && head.size() - 8 <= 100000000, rule);
    Json json{head.substr(8), rule};
    need(json.rest.substr(0, 1) == "{" && is_utf8(json.rest), rule);
    Head result;
    std::multiset<std::pair<uint64_t, uint64_t>> ranges; // of the data
    json.object([&](const string& name) {
        if (name == "__metadata__") return json.object([&](const string&) { json.text(); });
        Placed& tensor = result.tensors[name];
        Shape offsets;
        int members = 0;
        json.object([&](const string& member) {
            members++;
            if (member == "shape") tensor.shape = json.integers();
            else if (member == "data_offsets") offsets = json.integers();
            else {
                need(member == "dtype", rule);
                tensor.dtype = find_dtype([text = json.text()](const Dtype& d) { return d.name == text; }, rule);
            }
        });
        need(members == 3 && offsets.size() == 2 && offsets[0] <= offsets[1], rule);
        tensor.begin = offsets[0], tensor.size = offsets[1] - offsets[0];
        need(tensor.size == bytes_of(tensor.shape, tensor.dtype, rule), rule);
        ranges.emplace(offsets[0], offsets[1]);
    });
    json.skip_space();
    need(json.rest.empty(), rule);
    for (const auto& [begin, end] : ranges) need(begin == result.data_size, rule), result.data_size = end;
    return result;
}

// Writes a file under a temporary name, then gives it its own. `data` has the tensors one after the other.
inline void write_file(const string& path, Bytes head, const std::vector<Placed>& places, Bytes data) {
    const string partial = path + ".partial";
    FILE* file = fopen(partial.c_str(), "wb");
    need_system(file, partial);
    auto write = [&](Bytes bytes) { return bytes.empty() || fwrite(bytes.data(), bytes.size(), 1, file) == 1; };
    bool ok = write(head);
    for (const Placed& place : places) {
        ok = ok && fseeko(file, off_t(head.size() + place.begin), SEEK_SET) == 0 && write(data.substr(0, place.size));
        data.remove_prefix(place.size);
    }
    ok = ok && fflush(file) == 0 && fsync(fileno(file)) == 0;
    ok = fclose(file) == 0 && ok && rename(partial.c_str(), path.c_str()) == 0;
    if (!ok) remove(partial.c_str());
    need_system(ok, path);
}
