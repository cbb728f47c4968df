# Both files of the TPDE pair format, version 1.3, in Kaitai Struct. tpde-format.md is the norm:
# this describes where things lie, not all that a reader must check (its section 13).
#
# A compressed section must be expanded by zstd first; then parse its bytes by the types
# `tensors_section` and `files_section`, which take the count of their entries as a parameter, and
# `tables_section`, which takes the entries of the tensors. So must a payload of codec 2 be given to
# `conditioned_header`: where it lies, and which codec it has, is for the index to say.
meta:
  id: tpde
  title: TPDE pair, index or blob
  file-extension:
    - tpde-index
    - tpde-blob
  ks-version: 0.11
  encoding: UTF-8
  endian: le
seq:
  - id: magic
    type: u4
    enum: magics
    valid:
      any-of: [magics::index, magics::blob]
  - id: magic_end
    contents: [0x0d, 0x0a, 0x1a, 0x0a]
  - id: body
    type:
      switch-on: magic
      cases:
        'magics::index': index
        'magics::blob': blob
types:
  index:
    seq:
      - id: version_major
        type: u2
        valid: 1
      - id: version_minor
        type: u2
      - id: header_size
        type: u4
        valid: 256
      - id: required_features
        type: u8
        valid:
          expr: '_ <= 7 or (_ >= 16 and _ <= 23)'
        doc: bit 0 digests, bit 1 payload_list, bit 2 parts, bit 4 derived
      - id: optional_features
        type: u8
      - id: index_size
        type: u8
      - id: blob_size
        type: u8
      - id: chunk_count
        type: u4
        valid:
          max: 0x7fffffff
      - id: tensor_count
        type: u4
        valid:
          max: 0x1000000
      - id: file_count
        type: u4
        valid:
          max: 0x10000
      - id: reserved
        type: u4
        valid: 0
      - id: sections
        type: section_entry
        repeat: expr
        repeat-expr: 6
        doc: chunks, sums, digests, tensors, files, tables
      - id: payload_root
        size: 32
        if: has_digests
      - id: payload_root_reserved
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        if: not has_digests
      - id: reserved2
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
      - id: header_crc32
        type: u4
        doc: CRC-32 of bytes 0 to 251
    instances:
      has_digests:
        value: required_features & 1 != 0
      has_payload_list:
        value: required_features & 2 != 0
      has_parts:
        value: required_features & 4 != 0
      chunks:
        io: _root._io
        pos: sections[0].offset
        type: chunk_metadata
        repeat: expr
        repeat-expr: chunk_count
      sums:
        io: _root._io
        pos: sections[1].offset
        type: chunk_sums
        repeat: expr
        repeat-expr: chunk_count
      payload_list:
        io: _root._io
        pos: sections[1].offset + 16 * chunk_count
        size: 16
        repeat: expr
        repeat-expr: chunk_count
        if: has_payload_list
        doc: BLAKE3-128 of each payload, zeros for a chunk without one
      roots:
        io: _root._io
        pos: sections[2].offset
        type: root_digests
      digests:
        io: _root._io
        pos: sections[2].offset + 64
        type: tensor_digests
        repeat: expr
        repeat-expr: tensor_count
      tensors_stored:
        io: _root._io
        pos: sections[3].offset
        size: sections[3].stored_size
        doc: one zstd frame if the section is compressed
      tensors:
        io: _root._io
        pos: sections[3].offset
        size: sections[3].stored_size
        type: tensors_section(tensor_count, has_parts)
        if: not sections[3].is_compressed
      files_stored:
        io: _root._io
        pos: sections[4].offset
        size: sections[4].stored_size
        doc: one zstd frame if the section is compressed
      files:
        io: _root._io
        pos: sections[4].offset
        size: sections[4].stored_size
        type: files_section(file_count)
        if: not sections[4].is_compressed
      tables_stored:
        io: _root._io
        pos: sections[5].offset
        size: sections[5].stored_size
        doc: one zstd frame if the section is compressed
      tables:
        io: _root._io
        pos: sections[5].offset
        size: sections[5].stored_size
        type: tables_section(tensors.entries)
        if: not sections[3].is_compressed and not sections[5].is_compressed
      pair_digest:
        io: _root._io
        pos: index_size - 32
        size: 32
        doc: BLAKE3 of all bytes of the index before
  section_entry:
    seq:
      - id: offset
        type: u8
      - id: stored_size
        type: u8
      - id: expanded_size
        type: u8
    instances:
      is_compressed:
        value: stored_size != expanded_size
  chunk_metadata:
    seq:
      - id: blob_offset
        type: u8
      - id: compressed_size
        type: u4
      - id: uncompressed_size
        type: u4
      - id: num_deltas
        type: u4
      - id: crc32
        type: u4
        doc: of the payload as stored
      - id: output_offset
        type: u8
        doc: in lanes of the tensor
  chunk_sums:
    seq:
      - id: base_sum
        type: u8
      - id: target_sum
        type: u8
  root_digests:
    seq:
      - id: base_root
        size: 32
      - id: target_root
        size: 32
  tensor_digests:
    seq:
      - id: base_digest
        size: 16
      - id: target_digest
        size: 16
  tensors_section:
    params:
      - id: tensor_count
        type: u4
      - id: has_parts
        type: bool
    seq:
      - id: entries
        type: tensor_entry(has_parts)
        repeat: expr
        repeat-expr: tensor_count
      - id: dims
        type: dims(entries[_index].rank, entries[_index].part)
        repeat: expr
        repeat-expr: tensor_count
      - id: names
        type: names(entries[_index].name_size, entries[_index].base_name_size, entries[_index].scales_name_size)
        repeat: expr
        repeat-expr: tensor_count
  tensor_entry:
    doc: describes a tensor, or a part of one
    params:
      - id: has_parts
        type: bool
    seq:
      - id: name_size
        type: u4
        doc: 0 for a further part
      - id: base_name_size
        type: u4
        doc: 0 if the base tensor has the same name, if there is none, and for a further part
      - id: dtype
        type: u2
        enum: dtypes
      - id: rank
        type: u2
      - id: base_kind
        type: u2
        enum: base_kinds
      - id: codec
        type: u2
        enum: codecs
      - id: chunk_lanes_log2
        type: u1
      - id: part
        type: u1
        enum: parts
        valid:
          expr: 'has_parts ? _.to_i <= 2 : _.to_i == 0'
      - id: reserved
        contents: [0, 0]
      - id: tables_size
        type: u4
      - id: first_chunk
        type: u4
      - id: chunk_count
        type: u4
      - id: base_param
        type: u8
        doc: with a derived base, four fields
    instances:
      is_derived:
        value: base_kind == base_kinds::cast or base_kind == base_kinds::dequantised
      base_dtype:
        value: base_param & 0xffff
        enum: dtypes
        if: is_derived
      base_form:
        value: (base_param / 0x10000) & 0xff
        enum: base_forms
        if: is_derived
      scales_name_size:
        value: 'is_derived ? base_param / 0x100000000 : 0'
  dims:
    params:
      - id: rank
        type: u2
      - id: part
        type: u1
        enum: parts
    seq:
      - id: shape
        type: u8
        repeat: expr
        repeat-expr: rank
        if: part != parts::further
        doc: that of the tensor, also where the entry describes its first part
      - id: origins
        type: u8
        repeat: expr
        repeat-expr: rank
        if: part != parts::whole
      - id: extents
        type: u8
        repeat: expr
        repeat-expr: rank
        if: part != parts::whole
  names:
    params:
      - id: name_size
        type: u4
      - id: base_name_size
        type: u4
      - id: scales_name_size
        type: u4
    seq:
      - id: name
        type: str
        size: name_size
      - id: base_name
        type: str
        size: base_name_size
        doc: empty if the base tensor has the same name, or if there is none
      - id: scales_name
        type: str
        size: scales_name_size
        doc: empty if the base is not quantised
  tables_section:
    params:
      - id: tensors
        type: tensor_entry[]
    seq:
      - id: tables
        size: tensors[_index].tables_size
        type: tensor_tables
        repeat: expr
        repeat-expr: tensors.size
  tensor_tables:
    doc: those of codec 2; other codecs have none
    seq:
      - id: reference
        type: u2
        if: not _io.eof
        doc: the number of a set of the tensors before, from 1 on; 0 if the set follows
      - id: table_set
        type: table_set
        if: not _io.eof
  table_set:
    seq:
      - id: class_count
        type: u1
        valid:
          min: 1
          max: 15
      - id: classes
        type: table_class
        repeat: expr
        repeat-expr: class_count
  table_class:
    seq:
      - id: token_count
        type: u1
        valid:
          min: 1
          max: 180
      - id: frequencies
        type: frequency
        repeat: expr
        repeat-expr: token_count
        doc: they add up to 4096
  frequency:
    seq:
      - id: low
        type: u1
      - id: rest
        type: u1
        if: low >= 128
    instances:
      value:
        value: 'low < 128 ? low : low - 128 + 128 * rest'
  conditioned_header:
    doc: the first bytes of a payload of codec 2
    seq:
      - id: low_bits
        type: u1
        valid:
          max: 64
      - id: states_log2
        type: u1
        valid:
          max: 5
      - id: segments_log2
        type: u1
        valid:
          max: 5
      - id: activity_bits
        type: u1
        valid:
          max: 2
      - id: first_context
        type: u2
      - id: context_count
        type: u1
        valid:
          min: 1
          max: 64
      - id: reserved
        type: u1
        valid: 0
      - id: exception_count
        type: u4
      - id: center
        type: u4
  files_section:
    params:
      - id: file_count
        type: u4
    seq:
      - id: entries
        type: file_entry
        repeat: expr
        repeat-expr: file_count
      - id: names
        type: file_name(entries[_index].name_size)
        repeat: expr
        repeat-expr: file_count
      - id: contents
        type: file_content(entries[_index].stored_size)
        repeat: expr
        repeat-expr: file_count
  file_entry:
    seq:
      - id: kind
        type: u2
        enum: file_kinds
      - id: reserved
        type: u2
        valid: 0
      - id: name_size
        type: u4
      - id: content_size
        type: u8
      - id: content_digest
        size: 16
      - id: reserved2
        type: u8
        valid: 0
    instances:
      is_stored:
        value: kind == file_kinds::safetensors or kind == file_kinds::verbatim
      stored_size:
        value: 'is_stored ? content_size : 0'
  file_name:
    params:
      - id: size
        type: u4
    seq:
      - id: value
        type: str
        size: size
        encoding: ASCII
  file_content:
    params:
      - id: size
        type: u8
    seq:
      - id: value
        size: size
  blob:
    seq:
      - id: version_major
        type: u2
        valid: 1
      - id: version_minor
        type: u2
      - id: header_size
        type: u4
        valid: 64
      - id: blob_size
        type: u8
      - id: pair_digest
        size: 32
      - id: reserved
        type: u4
        valid: 0
      - id: header_crc32
        type: u4
        doc: CRC-32 of bytes 0 to 59
      - id: payloads
        size-eos: true
        doc: the records of the index say where each payload lies
enums:
  magics:
    0x49505489: index
    0x42505489: blob
  dtypes:
    0: bool
    1: u8
    2: i8
    3: u16
    4: i16
    5: u32
    6: i32
    7: u64
    8: i64
    16: f16
    17: bf16
    18: f32
    19: f64
    20: c64
    32: f8_e4m3
    33: f8_e5m2
    34: f8_e4m3fnuz
    35: f8_e5m2fnuz
    36: f8_e8m0
    48: f4
    49: f6_e2m3
    50: f6_e3m2
  parts:
    0: whole
    1: first
    2: further
  base_kinds:
    0: none
    1: same
    2: prefix
    3: cast
    4: dequantised
  base_forms:
    0: none
    1: fp8_blocks
    2: mxfp4
    3: mxfp4_transposed
  codecs:
    0: raw
    1: zstd
    2: conditioned
  file_kinds:
    0: safetensors
    1: safetensors_of_base
    2: verbatim
    3: verbatim_of_base
