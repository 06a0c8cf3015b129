# The levels of little-endian POWER, which begins with POWER8.
target_sources(tidewheel_runtime PRIVATE native/runtime/levels/power.cpp)

# Before it allocates registers, gcc moves loads ahead, and then has too few registers for POWER8's integer tiles.
tidewheel_isa_level(vsx FLAGS -mcpu=power8 $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
tidewheel_isa_level(vsx3 FLAGS -mcpu=power9)
tidewheel_isa_level(mma FLAGS -mcpu=power10
  FLOATS vsx3 BFLOAT16 vsx3 SMALL_FLOATS vsx3 INT8 vsx3 INT4 vsx3 BLOCKS vsx3)

# The plain C++ level is here only for comparison: every processor has vectors.
tidewheel_emulate(scalar power9)
# Not on power8: glibc's sincos has an instruction that a POWER8 executes as an older one, but qemu's POWER8 refuses.
tidewheel_emulate(vsx power9)
tidewheel_emulate(vsx3 power9)
tidewheel_emulate(mma power10)
