// `tpde_raw` for strided tensors.
#define TPDE_STRIDED
#include "raw/raw.cu"
