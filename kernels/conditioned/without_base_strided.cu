// `tpde_without_base` for strided tensors.
#define TPDE_STRIDED
#include "conditioned/without_base.cu"
