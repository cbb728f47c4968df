// `tpde_conditioned` for tensors whose base lanes are formed.
#define TPDE_DERIVED
#include "conditioned/conditioned.cu"
