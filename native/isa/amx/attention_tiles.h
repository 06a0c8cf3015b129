// Sums of products on tile registers, for attention: rows of bytes by columns that lie as tiles take them.
#pragma once

#include <utility>

#include "kernels/attention_parts.h"
#include "tiles.h"

namespace tidewheel::TW_ISA {

constexpr int kTileColumns = kTileLine / 4;  // of a tile of sums, of four bytes each

template <int NUMBER>
using Tile = std::integral_constant<int, NUMBER>;

// Up to 16 rows by four tiles of columns at a time, or up to 32 rows by two, so that a tile of columns that is loaded
// meets both tiles of rows. Sums are tiles 0 to 3, rows 4 and 5, columns 6 and 7.
class TileSums {
 public:
  static constexpr int kRows = 2 * kTileHeight;

  void shape(int rows) {
    tiles_.shape(rows, shapes);
    rows_ = rows;
  }

  // Each of `steps` products takes 64 bytes of every row, at x, and 16 lines of 64 bytes, `line` bytes apart, which begin
  // at at(step, column) for a tile of columns. `out` has 64 bytes for each of them in every row; ADD: they are added to.
  // dot(c, a, b) multiplies tiles, of which it gets the numbers.
  template <bool ADD, typename Dot, typename At>
  void multiply(const void* x, size_t x_line, int steps, int columns, size_t line, void* out, size_t out_line, Dot&& dot,
                At&& at) {
    const Operands o{static_cast<const char*>(x), x_line, steps, line, static_cast<char*>(out), out_line};
    int column = 0;
    if (rows_ > kTileHeight) {
      for (; column + 2 <= columns; column += 2) run<ADD, 2, 2>(o, column, dot, at);
      if (column < columns) run<ADD, 2, 1>(o, column, dot, at);
    } else {
      for (; column + 4 <= columns; column += 4) run<ADD, 1, 4>(o, column, dot, at);
      for (; column < columns; ++column) run<ADD, 1, 1>(o, column, dot, at);
    }
  }

 private:
  struct Operands {
    const char* x;
    size_t x_line;
    int steps;
    size_t line;
    char* out;
    size_t out_line;
  };

  static TileShapes shapes(int rows) {
    const int above = rows < kTileHeight ? rows : kTileHeight, below = rows - above;
    TileShapes s;
    for (const int tile : {0, 1, 4}) s.set(tile, above, kTileLine);
    for (const int tile : {2, 3}) s.set(tile, below ? below : above, kTileLine);
    s.set(5, below, kTileLine);
    for (const int tile : {6, 7}) s.set(tile, kTileHeight, kTileLine);
    return s;
  }

  // HEIGHT tiles of rows by COUNT of columns, from `first` on.
  template <bool ADD, int HEIGHT, int COUNT, typename Dot, typename At>
  static void run(const Operands& o, int first, Dot& dot, At& at) {
    const auto each = [&](auto&& body) __attribute__((always_inline)) {
      repeat<HEIGHT * COUNT>([&](auto i) __attribute__((always_inline)) {
        constexpr int kRow = i / COUNT, kColumn = i % COUNT;
        body(Tile<2 * kRow + kColumn>{},
             o.out + kRow * kTileHeight * o.out_line + (first + kColumn) * kTileLine);
      });
    };
    each([&](auto sum, char* out) __attribute__((always_inline)) {
      if constexpr (ADD) tileloadd<sum>(out, o.out_line);
      else tilezero<sum>();
    });
    const char* x = o.x;
    for (int step = 0; step < o.steps; ++step, x += kTileLine) {
      repeat<HEIGHT>([&](auto h) __attribute__((always_inline)) { tileloadd<4 + h>(x + h * kTileHeight * o.x_line, o.x_line); });
      repeat<COUNT>([&](auto c) __attribute__((always_inline)) {
        constexpr int kColumn = c, kTile = 6 + c % 2;
        tileloadd<kTile>(at(step, first + kColumn), o.line);
        repeat<HEIGHT>([&](auto h) __attribute__((always_inline)) {
          dot(Tile<2 * h + kColumn>{}, Tile<4 + h>{}, Tile<kTile>{});
        });
      });
    }
    each([&](auto sum, char* out) __attribute__((always_inline)) { tilestored<sum>(out, o.out_line); });
  }

  Tiles tiles_;
  int rows_ = 0;
};

}  // namespace tidewheel::TW_ISA
