// The instructions of native/isa/amx/tile_registers.h, done by the model.
#pragma once

#include "../tile_model.h"

namespace tidewheel::TW_ISA {

inline void ldtilecfg(const void* config) { tile_model::ldtilecfg(config); }
inline void tilerelease() { tile_model::tilerelease(); }

template <int TILE>
void tilezero() {
  tile_model::tilezero(TILE);
}
template <int TILE>
void tileloadd(const void* p, size_t stride) {
  tile_model::tileloadd(TILE, p, stride);
}
template <int TILE>
void tilestored(void* p, size_t stride) {
  tile_model::tilestored(TILE, p, stride);
}
template <int C, int A, int B>
void tdpbf16ps() {
  tile_model::tdpbf16ps(C, A, B);
}
template <int C, int A, int B>
void tdpbssd() {
  tile_model::tdpbssd(C, A, B);
}
template <int C, int A, int B>
void tdpbusd() {
  tile_model::tdpbusd(C, A, B);
}
template <int C, int A, int B>
void tdpbsud() {
  tile_model::tdpbsud(C, A, B);
}

}  // namespace tidewheel::TW_ISA
