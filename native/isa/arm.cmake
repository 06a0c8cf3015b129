# The levels of 64-bit ARM. Each level's -march has no more than its detection checks. With a higher architecture
# version, compilers would also use everything else that came with that version.
target_sources(tidewheel_runtime PRIVATE native/runtime/levels/arm.cpp)

# Before it allocates registers, gcc moves loads ahead, and then has too few registers for a tile.
set(ARM_OPTIONS $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
tidewheel_isa_level(neon FLAGS -march=armv8-a ${ARM_OPTIONS})
tidewheel_isa_level(neon_dotprod FLAGS -march=armv8.2-a+dotprod ${ARM_OPTIONS}
  FLOATS neon BFLOAT16 neon SMALL_FLOATS neon INT4 neon)
tidewheel_isa_level(neon_i8mm FLAGS -march=armv8.2-a+dotprod+bf16+i8mm ${ARM_OPTIONS}
  FLOATS neon INT4 neon)

# The plain C++ level is here only for comparison: every processor has NEON. -O3 would take twice as long.
target_compile_options(kernels_scalar PRIVATE -O2)

tidewheel_emulate(scalar cortex-a53)
tidewheel_emulate(neon cortex-a53 max)
tidewheel_emulate(neon_dotprod neoverse-n1 max)
# qemu 7.2 has no processor between the last level and `max`. The assembler accepts nothing that -march does not allow.
tidewheel_emulate(neon_i8mm max,sve=off,sme=off,pauth=off)
