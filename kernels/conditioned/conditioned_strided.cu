// `tpde_conditioned` for strided tensors.
#define TPDE_STRIDED
#include "conditioned/conditioned.cu"
