// `tpde_raw` for tensors whose base lanes are formed.
#define TPDE_DERIVED
#include "raw/raw.cu"
