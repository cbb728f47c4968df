// Arguments of `tpde_encode_form`; `cuda/src/encode/convert.rs` has the same structs.
#pragma once
#include "common/format.cuh"

// Consecutive lanes of a derived base, to be formed. `base`, `base_row` and `base_pitch` are as in DeviceTensor and TensorRows.
struct FormRange {
    u64 base;
    u64 base_row, base_pitch;
    u64 output; // a multiple of 16
    u64 first;  // index of the first lane, a multiple of 64
    u32 lanes;
    u32 first_part; // number of parts of TPDE_FORM_PART lanes of all ranges before this one
    u16 dtype;
    u16 lane_log2;
    u32 reserved;
    TensorForm form;
};
TPDE_OFFSET(FormRange, base, 0);
TPDE_OFFSET(FormRange, base_row, 8);
TPDE_OFFSET(FormRange, base_pitch, 16);
TPDE_OFFSET(FormRange, output, 24);
TPDE_OFFSET(FormRange, first, 32);
TPDE_OFFSET(FormRange, lanes, 40);
TPDE_OFFSET(FormRange, first_part, 44);
TPDE_OFFSET(FormRange, dtype, 48);
TPDE_OFFSET(FormRange, lane_log2, 50);
TPDE_OFFSET(FormRange, reserved, 52);
TPDE_OFFSET(FormRange, form, 56);
TPDE_SIZE(FormRange, 104);

// The parameter, passed by value.
struct Form {
    u64 ranges; // const FormRange*
    u32 count;  // number of ranges, none of which is empty
    u32 parts;  // number of parts of all ranges
};
TPDE_OFFSET(Form, ranges, 0);
TPDE_OFFSET(Form, count, 8);
TPDE_OFFSET(Form, parts, 12);
TPDE_SIZE(Form, 16);

#define TPDE_FORM_THREADS 256
#define TPDE_FORM_PART 16384 // lanes per part, the work of a block
