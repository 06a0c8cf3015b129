// The way of a checkpoint's rows into the lanes of packed columns.
#pragma once

#include "kernels/layout.h"

namespace tidewheel::TW_ISA {

// The packed column of a row, for arguments that say how columns alternate: see PackWeightsArgs.
template <typename Args>
TW_INLINE int packed_column(const Args& args, int row) {
  return row / args.group * args.group_stride + row % args.group + args.offset;
}

// How many rows, from `row` on, become neighbours within one block of `width` packed columns.
template <typename Args>
TW_INLINE int run_length(const Args& args, int row, int width) {
  int count = width - packed_column(args, row) % width;
  if (args.group - row % args.group < count) count = args.group - row % args.group;
  return args.row_end - row < count ? args.row_end - row : count;
}

#if defined(__clang__) || __GNUC__ >= 12
using Four = float __attribute__((vector_size(16)));

// Transposes columns `in` [4][in_stride] of four-byte units into rows `out` [4][out_stride]. Strides are in bytes.
TW_INLINE void transpose_four(const void* in, ptrdiff_t in_stride, void* out, ptrdiff_t out_stride) {
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
  Four a, b, c, d;
  std::memcpy(&a, from, sizeof a);
  std::memcpy(&b, from + in_stride, sizeof b);
  std::memcpy(&c, from + 2 * in_stride, sizeof c);
  std::memcpy(&d, from + 3 * in_stride, sizeof d);
  const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Four ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Four rows[] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                       __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                       __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * out_stride, &rows[i], sizeof rows[i]);
}
#else
TW_INLINE void transpose_four(const void* in, ptrdiff_t in_stride, void* out, ptrdiff_t out_stride) {
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) std::memcpy(to + i * out_stride + j * 4, from + j * in_stride + i * 4, 4);
  }
}
#endif

// The position of a packed column: its strip, and its lane there.
struct Column {
  char* strip;
  int lane;
};

TW_INLINE Column find_column(const WeightFormat& format, void* weight, int k, int column) {
  return {static_cast<char*>(weight) + size_t(column / kLanes) * strip_bytes(format, k), column % kLanes};
}

// Writes `count` consecutive columns of a strip, from `first` on. They take lanes 0 to `count` - 1 of the values.
struct Lanes {
  Column first;
  int count;

  // Elements [kLanes] at `to` within the strip.
  template <typename T>
  [[gnu::always_inline]] void put(char* to, const T* from) const {
    char* place = to + first.lane * sizeof(T);
    if (count == kLanes) {
      std::memcpy(place, from, sizeof(T) * kLanes);
    } else {
      std::memcpy(place, from, sizeof(T) * count);
    }
  }
};

}  // namespace tidewheel::TW_ISA
