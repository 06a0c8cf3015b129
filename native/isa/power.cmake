# The levels of little-endian POWER, which begins with POWER8.
target_sources(tidewheel_runtime PRIVATE native/runtime/levels/power.cpp)

tidewheel_isa_level(vsx FLAGS -mcpu=power8)
tidewheel_isa_level(vsx3 FLAGS -mcpu=power9)

# The plain C++ level is here only for comparison: every processor has vectors.
tidewheel_emulate(scalar power9)
tidewheel_emulate(vsx power9)
tidewheel_emulate(vsx3 power9 power10)
