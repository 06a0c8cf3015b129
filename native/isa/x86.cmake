# The levels of x86-64.
target_sources(tidewheel_runtime PRIVATE native/runtime/levels/x86.cpp)

set(AVX2 -mavx2 -mfma -mf16c)
tidewheel_isa_level(avx2 ${AVX2})
tidewheel_isa_level(avx2_vnni ${AVX2} -mavxvnni)
# gcc 12 takes its own header's deliberately undefined registers for a mistake of ours.
set(AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512
  -Wno-uninitialized -Wno-maybe-uninitialized)
tidewheel_isa_level(avx512 ${AVX512})
set(AVX512_VNNI ${AVX512} -mavx512vnni)
tidewheel_isa_level(avx512_vnni ${AVX512_VNNI})
set(AVX512_BF16 ${AVX512_VNNI} -mavx512bf16)
tidewheel_isa_level(avx512_bf16 ${AVX512_BF16})
tidewheel_isa_level(amx ${AVX512_BF16} -mamx-tile -mamx-bf16 -mamx-int8)
