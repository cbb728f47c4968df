# One command surface: `just` lists what there is. Continuous integration runs .ci/run, which is made of the same commands.

_:
    @just --list

# Formatting, lints, module graph, budgets, documentation: all that runs no test
check:
    scripts/check

# What the working tree changes: formatting, lints, tests of the changed crates
quick:
    scripts/quick

# Core and library, vectors; with --all every test: also program, stores, kernels, Python package, real checkpoints
test *arguments:
    scripts/test {{arguments}}

# The Python package, built and installed into target/: its tests and the examples
python:
    python/test

# Every fuzz target for some seconds
fuzz seconds="60":
    fuzz/run.sh {{seconds}}

# Benchmarks on generated data; `tpde bench BASE TARGET` measures checkpoints of your own
bench *arguments:
    cargo bench {{arguments}}

# The kernels on the processor: all cases, or those that have a name
emulate *arguments:
    kernels/emulator/run {{arguments}}

# Everything that needs a CUDA device
gpu *arguments:
    scripts/gpu-check {{arguments}}

# Write the vectors that are not frozen and say what changed; compare the frozen ones
golden:
    "$(scripts/environment)" testdata/make_vectors.py
    "$(scripts/environment)" testdata/spec_tables.py
    git status --short testdata

# The documents as pages for a browser, in target/site; with --serve also shown
site *arguments:
    scripts/site {{arguments}}

# All that continuous integration runs
ci:
    .ci/run
