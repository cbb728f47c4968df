"""The test vectors of TPDE; `testdata/make_vectors.py` writes them. Best read in this order:

    data          constants, the lanes of the vectors, sums
    zstd          codec 1, and frames made by hand
    conditioned   codec 2: an encoder
    pair          tensors and pairs to be, and the writer that makes their bytes
    cases         what the vectors are collected in, and the edits that break a pair
    parts         parts of tensors, of version 1.2
    derived       derived bases, of the draft of version 1.3

and then the vectors: valid, invalid, valid_conditioned, invalid_conditioned, checkpoints, frames, those of digests, parts and
derived bases, and readings: passages that readers could understand in two ways.
"""
