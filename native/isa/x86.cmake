# The levels of x86-64, each with the groups of kernels that it shares with a level with fewer instructions.
target_sources(tidewheel_runtime PRIVATE native/runtime/levels/x86.cpp)

set(AVX2 -mavx2 -mfma -mf16c)
tidewheel_isa_level(avx2 FLAGS ${AVX2})
tidewheel_isa_level(avx2_vnni FLAGS ${AVX2} -mavxvnni
  FLOATS avx2 BFLOAT16 avx2 SMALL_FLOATS avx2 INT4 avx2)
# gcc 12 warns about registers that its own header deliberately leaves undefined.
set(AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512
  -Wno-uninitialized -Wno-maybe-uninitialized)
tidewheel_isa_level(avx512 FLAGS ${AVX512})
set(AVX512_VNNI ${AVX512} -mavx512vnni)
tidewheel_isa_level(avx512_vnni FLAGS ${AVX512_VNNI}
  FLOATS avx512 BFLOAT16 avx512 SMALL_FLOATS avx512 INT4 avx512)
set(AVX512_BF16 ${AVX512_VNNI} -mavx512bf16)
tidewheel_isa_level(avx512_bf16 FLAGS ${AVX512_BF16}
  FLOATS avx512 INT8 avx512_vnni INT4 avx512 BLOCKS avx512_vnni)
tidewheel_isa_level(amx FLAGS ${AVX512_BF16} -mamx-tile -mamx-bf16 -mamx-int8
  FLOATS avx512 SMALL_FLOATS avx512_bf16 INT4 avx512)

# The plain C++ level's vectors are loops. -O3 unrolls them before it turns them into SSE2 vectors, which takes three
# times as long and makes slower code in these files. Processors without vectors need unrolled loops: there -O2 is
# several times slower.
set_source_files_properties(
  native/kernels/gemm.cpp native/kernels/attention_bfloat16.cpp native/kernels/attention_small_floats.cpp
  PROPERTIES COMPILE_OPTIONS $<$<STREQUAL:$<TARGET_PROPERTY:NAME>,kernels_scalar>:-O2>)
