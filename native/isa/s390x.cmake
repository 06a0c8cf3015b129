# The levels of IBM Z.
target_sources(tidewheel_runtime PRIVATE native/runtime/levels/s390x.cpp)

# If gcc schedules before it allocates registers, the integer micro-kernels need more registers than there are. These
# processors reorder instructions themselves.
set(VXE -mzvector $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
tidewheel_isa_level(vxe FLAGS -march=z14 ${VXE})
tidewheel_isa_level(vxe2 FLAGS -march=z15 ${VXE}
  FLOATS vxe BFLOAT16 vxe SMALL_FLOATS vxe)

# qemu knows z14 and z15 by name, but refuses them because it lacks other features of theirs.
tidewheel_emulate(scalar max,vx=off,vxeh=off,vxeh2=off,minste2=off,minste3=off)
tidewheel_emulate(vxe max,vxeh2=off,minste3=off)
tidewheel_emulate(vxe2 max)
