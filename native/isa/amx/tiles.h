// The shapes of tile registers, and the object that owns them.
#pragma once

#include <tile_registers.h>  // from the include path: the tests put a model in its place

namespace tidewheel::TW_ISA {

constexpr int kTileHeight = 16, kTileLine = 64;  // rows, and bytes of a row

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int height, int line) {
    rows[tile] = static_cast<uint8_t>(height);
    bytes[tile] = static_cast<uint16_t>(height ? line : 0);
  }
};

// Owns the calling thread's tiles. They are configured when the number of rows changes, and released at the end.
// Otherwise context switches and signals would have to save 8 KiB even where nothing is multiplied.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) tilerelease();
  }

  // `shapes(rows)` returns the TileShapes for that number of rows.
  template <typename Shapes>
  void shape(int rows, Shapes&& shapes) {
    if (rows == rows_) return;
    const TileShapes config = shapes(rows);
    ldtilecfg(&config);
    rows_ = rows;
  }

 private:
  int rows_ = 0;
};

}  // namespace tidewheel::TW_ISA
