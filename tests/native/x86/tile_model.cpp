#include "tile_model.h"

#include <cstdint>
#include <cstring>
#include <string>

#include <immintrin.h>

namespace tidewheel::tile_model {
namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64, kConfigBytes = 64;
constexpr int kStartRow = 1, kBytesAt = 16, kRowsAt = 48;  // within a configuration

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[kRows][kRowBytes] = {};

  template <typename T>
  T get(int row, int index) const {
    T value;
    std::memcpy(&value, data[row] + index * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  void put(int row, int index, T value) {
    std::memcpy(data[row] + index * sizeof(T), &value, sizeof(T));
  }
  void zero_rows_from(int row) {
    for (; row < kRows; ++row) std::memset(data[row], 0, kRowBytes);
  }
};

struct Registers {
  bool configured = false;
  int start_row = 0, configurations = 0;
  Tile tiles[kTiles];

  void initialize() {
    configured = false;
    start_row = 0;
    for (Tile& tile : tiles) tile = {};
  }
};

thread_local Registers registers;

Tile& find(int tile) {
  if (!registers.configured) throw InvalidOpcode("tiles are not configured");
  if (tile < 0 || tile >= kTiles) throw InvalidOpcode("there is no tile " + std::to_string(tile));
  Tile& found = registers.tiles[tile];
  if (found.rows == 0) throw InvalidOpcode("tile " + std::to_string(tile) + " has no shape");
  return found;
}

struct Product {
  Tile& c;
  const Tile &a, &b;
};

Product find_product(int c, int a, int b) {
  if (c == a || c == b || a == b) throw InvalidOpcode("a product needs three tiles");
  const Product p{find(c), find(a), find(b)};
  if (p.c.bytes % 4 || p.a.bytes % 4 || p.b.bytes % 4) throw InvalidOpcode("a product's rows are of whole sums");
  if (p.c.rows != p.a.rows) throw InvalidOpcode("C and A differ in rows");
  if (p.c.bytes != p.b.bytes) throw InvalidOpcode("C and B differ in columns");
  if (p.a.bytes / 4 != p.b.rows) throw InvalidOpcode("A's columns and B's rows differ");
  return p;
}

// Denormal numbers are taken for 0 and become 0, and sums are rounded to the nearest, ties to even, whatever the caller set.
class Rounding {
 public:
  Rounding() : saved_(_mm_getcsr()) { _mm_setcsr(kMasked | kDenormalsAreZero | kFlushToZero); }
  ~Rounding() { _mm_setcsr(saved_); }
  Rounding(const Rounding&) = delete;
  Rounding& operator=(const Rounding&) = delete;

 private:
  static constexpr unsigned kDenormalsAreZero = 1u << 6, kFlushToZero = 1u << 15, kMasked = 0x1f80;
  const unsigned saved_;
};

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Out of line, so that nothing of it moves out of a Rounding's life. By the instruction: a C++ sum need not be one.
[[gnu::noinline]] void accumulate_pairs(const Product& p) {
  for (int m = 0; m < p.c.rows; ++m) {
    for (int n = 0; n < p.c.bytes / 4; ++n) {
      __m128 even = _mm_setzero_ps(), odd = _mm_setzero_ps();
      for (int k = 0; k < p.a.bytes / 4; ++k) {
        const auto a = [&](int i) { return _mm_set_ss(from_bfloat16(p.a.get<uint16_t>(m, 2 * k + i))); };
        const auto b = [&](int i) { return _mm_set_ss(from_bfloat16(p.b.get<uint16_t>(k, 2 * n + i))); };
        even = _mm_fmadd_ss(a(0), b(0), even);
        odd = _mm_fmadd_ss(a(1), b(1), odd);
      }
      const __m128 sum = _mm_add_ss(_mm_set_ss(p.c.get<float>(m, n)), _mm_add_ss(even, odd));
      p.c.put(m, n, _mm_cvtss_f32(sum));
    }
  }
}

template <typename A, typename B>
void accumulate_quads(int c, int a, int b) {
  const Product p = find_product(c, a, b);
  for (int m = 0; m < p.c.rows; ++m) {
    for (int n = 0; n < p.c.bytes / 4; ++n) {
      uint32_t sum = p.c.get<uint32_t>(m, n);  // wraps around
      for (int k = 0; k < p.a.bytes / 4; ++k) {
        for (int i = 0; i < 4; ++i) {
          sum += static_cast<uint32_t>(int{p.a.get<A>(m, 4 * k + i)} * int{p.b.get<B>(k, 4 * n + i)});
        }
      }
      p.c.put(m, n, sum);
    }
  }
  p.c.zero_rows_from(p.c.rows);
  registers.start_row = 0;
}

}  // namespace

void ldtilecfg(const void* config) {
  uint8_t bytes[kConfigBytes];
  std::memcpy(bytes, config, sizeof bytes);
  const auto require = [](bool holds, const char* why) {
    if (!holds) throw GeneralProtection(why);
  };
  const auto require_zeros = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) require(bytes[i] == 0, "reserved bytes are not 0");
  };
  require(bytes[0] <= 1, "there is no such palette");
  if (bytes[0] == 0) return registers.initialize();
  require_zeros(kStartRow + 1, kBytesAt);
  require_zeros(kBytesAt + 2 * kTiles, kRowsAt);
  require_zeros(kRowsAt + kTiles, kConfigBytes);
  Registers loaded;
  for (int i = 0; i < kTiles; ++i) {
    Tile& tile = loaded.tiles[i];
    tile.bytes = bytes[kBytesAt + 2 * i] | bytes[kBytesAt + 2 * i + 1] << 8;
    tile.rows = bytes[kRowsAt + i];
    require(tile.bytes <= kRowBytes && tile.rows <= kRows, "a tile is too large");
    require((tile.bytes == 0) == (tile.rows == 0), "a tile has rows or columns only");
  }
  loaded.configured = true;
  loaded.start_row = bytes[kStartRow];
  loaded.configurations = registers.configurations + 1;
  registers = loaded;
}

void sttilecfg(void* config) {
  uint8_t bytes[kConfigBytes] = {};
  if (registers.configured) {
    bytes[0] = 1;
    bytes[kStartRow] = static_cast<uint8_t>(registers.start_row);
    for (int i = 0; i < kTiles; ++i) {
      bytes[kBytesAt + 2 * i] = static_cast<uint8_t>(registers.tiles[i].bytes);
      bytes[kRowsAt + i] = static_cast<uint8_t>(registers.tiles[i].rows);
    }
  }
  std::memcpy(config, bytes, sizeof bytes);
}

void tilerelease() { registers.initialize(); }

void tilezero(int tile) {
  find(tile).zero_rows_from(0);
  registers.start_row = 0;
}

void tileloadd(int tile, const void* p, size_t stride) {
  Tile& to = find(tile);
  to.zero_rows_from(registers.start_row);
  for (int row = registers.start_row; row < to.rows; ++row) {
    std::memcpy(to.data[row], static_cast<const char*>(p) + row * stride, static_cast<size_t>(to.bytes));
  }
  registers.start_row = 0;
}

void tilestored(int tile, void* p, size_t stride) {
  const Tile& from = find(tile);
  for (int row = registers.start_row; row < from.rows; ++row) {
    std::memcpy(static_cast<char*>(p) + row * stride, from.data[row], static_cast<size_t>(from.bytes));
  }
  registers.start_row = 0;
}

void tdpbf16ps(int c, int a, int b) {
  const Product p = find_product(c, a, b);
  {
    const Rounding rounding;
    accumulate_pairs(p);
  }
  p.c.zero_rows_from(p.c.rows);
  registers.start_row = 0;
}

void tdpbssd(int c, int a, int b) { accumulate_quads<int8_t, int8_t>(c, a, b); }
void tdpbsud(int c, int a, int b) { accumulate_quads<int8_t, uint8_t>(c, a, b); }
void tdpbusd(int c, int a, int b) { accumulate_quads<uint8_t, int8_t>(c, a, b); }
void tdpbuud(int c, int a, int b) { accumulate_quads<uint8_t, uint8_t>(c, a, b); }

int configurations() { return registers.configurations; }
bool configured() { return registers.configured; }

}  // namespace tidewheel::tile_model
