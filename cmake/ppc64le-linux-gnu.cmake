# Debian's cross compiler (g++-powerpc64le-linux-gnu); what it makes runs under qemu-user-static.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ppc64le)
set(CMAKE_CXX_COMPILER powerpc64le-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-ppc64le-static -L /usr/powerpc64le-linux-gnu)
