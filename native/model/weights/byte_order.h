// Swaps bytes of numbers that have the other byte order than this machine: checkpoints are little-endian, IBM Z is
// big-endian. They are swapped while they are packed, a few rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tidewheel {

inline uint16_t swap_bytes(uint16_t word) { return __builtin_bswap16(word); }
inline uint32_t swap_bytes(uint32_t word) { return __builtin_bswap32(word); }

template <typename Word>
Word read_word(const void* data, int64_t index, bool swapped) {
  Word word;
  std::memcpy(&word, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof word), sizeof word);
  return swapped ? swap_bytes(word) : word;
}

// A matrix in memory; strides are in elements.
struct Lines {
  const void* data;
  ptrdiff_t row_stride, col_stride;
};

// Copies [rows, cols] to `to` and swaps the bytes. The copy keeps the order in memory: column by column if columns are
// contiguous, otherwise row by row. Returns the copy.
template <typename Word>
Lines swap_lines(const Lines& from, int rows, int cols, char* to) {
  const bool by_row = from.col_stride == 1;
  const ptrdiff_t outer = by_row ? from.row_stride : from.col_stride, inner = by_row ? 1 : from.row_stride;
  const int lines = by_row ? rows : cols, size = by_row ? cols : rows;
  for (int i = 0; i < lines; ++i) {
    for (int j = 0; j < size; ++j) {
      const Word word = read_word<Word>(from.data, i * outer + j * inner, true);
      std::memcpy(to + (size_t(i) * size + j) * sizeof word, &word, sizeof word);
    }
  }
  return by_row ? Lines{to, cols, 1} : Lines{to, 1, rows};
}

}  // namespace tidewheel
