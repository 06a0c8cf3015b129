// GEMM inputs: rows of float32 activations, normalized, and rounded or quantized as the weights need.
#include <limits>

#include "kernels/blocks.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

// Row `r` of a tile of `n`. `x` is [k], and zeros up to a whole group.
template <typename T>
void round_row(const float* x, int k, int r, int n, char* tile) {
  using A = typename Element<T>::Activation;
  constexpr int kRun = kFloatRun<T>;
  A* out = reinterpret_cast<A*>(tile);
  const int padded = round_up_to(k, kRun);
  if (kRun % kLanes == 0 || (n == 1 && padded % kLanes == 0)) {
    for (int i = 0; i < padded; i += kLanes) store_activations<T>(out + place_in_tile(i, r, n, kRun), load(x + i));
    return;
  }
  for (int i = 0; i < padded; i += kLanes) {
    A values[kLanes];
    store_activations<T>(values, load(x + i));
    const int count = padded - i < kLanes ? padded - i : kLanes;
    for (int j = 0; j < count; j += kRun) {
      std::memcpy(out + place_in_tile(i + j, r, n, kRun), values + j, sizeof(A) * kRun);
    }
  }
}

// Symmetric: the scale is 1/127 of the largest magnitude. If any value is not finite, the scale and the result are NaN.
struct Scale {
  float scale, inverse;
};

TW_INLINE Scale find_scale(const float* x, int count) {
  F largest = zero(), poison = zero();
  for (int i = 0; i < count; i += kLanes) {
    const F value = load(x + i);
    largest = max(abs(value), largest);
    poison = fma(value, zero(), poison);
  }
  const float magnitude = hmax(largest);
  return {magnitude / 127.0f + hsum(poison), magnitude > 0.0f ? 127.0f / magnitude : 0.0f};
}

// The same of several groups.
struct GroupScales {
  static constexpr int kMost = 16;
  float scale[kMost], inverse[kMost];
};

// Levels that reduce several vectors at once do so with the groups, unless a value is not finite. The bits are the same.
template <int MOST>
TW_INLINE void find_scales(const float* x, int groups, GroupScales& out) {
  if constexpr (requires(const F* each) { hmax_rows<MOST>(each); }) {
    static_assert(MOST == kLanes);
    F largest[MOST], poison = zero();
    for (int g = 0; g < groups; ++g) {
      largest[g] = zero();
#pragma GCC unroll 4
      for (int i = 0; i < kRowGroup; i += kLanes) {
        const F value = load(x + g * kRowGroup + i);
        largest[g] = max(abs(value), largest[g]);
        poison = fma(value, zero(), poison);
      }
    }
    if (hsum(poison) == 0.0f) {
      for (int g = groups; g < MOST; ++g) largest[g] = zero();
      const F magnitude = hmax_rows<MOST>(largest), most = set1(127.0f);
      store(out.scale, div(magnitude, most));
      store(out.inverse, keep_if(div(most, magnitude), magnitude, set1(std::numeric_limits<float>::denorm_min())));
      return;
    }
  }
  for (int g = 0; g < groups; ++g) {
    const Scale s = find_scale(x + g * kRowGroup, kRowGroup);
    out.scale[g] = s.scale, out.inverse[g] = s.inverse;
  }
}

template <int MOST>
TW_INLINE void store_sums(const I* sums, int groups, int32_t* to) {
  if constexpr (requires { store_hsums<MOST>(to, sums); }) {
    store_hsums<MOST>(to, sums);
  } else {
    for (int g = 0; g < groups; ++g) to[g] = hsum(sums[g]);
  }
}

// Quantizes 32 values, the inputs from `begin` on, into row `r` of `n`; returns the sums of what is in each lane.
template <int RUN>
TW_INLINE I quantize_group(const float* x, float inverse, int begin, int r, int n, char* quads) {
  constexpr int kPiece = RUN < kRowGroup ? RUN : kRowGroup;
  int8_t values[kRowGroup];
  I sum = set1_int(0);
#pragma GCC unroll 4
  for (int i = 0; i < kRowGroup; i += kLanes) {
    const I rounded = round_to_int(mul(load(x + i), set1(inverse)));
    sum = add(sum, rounded);
    store(values + i, rounded);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRowGroup; i += kPiece) {
    std::memcpy(quads + place_in_tile(begin + i, r, n, RUN), values + i, kPiece);
  }
  return sum;
}

// For weights of blocks.h, whose groups have a correction or one for each half.
void quantize_blocks_row(const WeightFormat& format, const float* x, int k, int r, int n, char* tile) {
  const BlockTraits traits = traits_of(format);
  const int parts = traits.halves ? 2 : 1, offset = code_offset(traits);
  const int group_bytes = static_cast<int>(sizeof(float)) * (1 + parts) + kRowGroup, part = kRowGroup / parts;
  for (int g = 0; g < row_groups(k); ++g, x += kRowGroup) {
    const Scale s = find_scale(x, kRowGroup);
    char* group = tile + size_t(g) * n * group_bytes;
    std::memcpy(group + r * sizeof(float), &s.scale, sizeof(float));
    int8_t values[kRowGroup];
    for (int p = 0; p < parts; ++p) {
      I sum = set1_int(0);
      for (int i = p * part; i < (p + 1) * part; i += kLanes) {
        const I rounded = round_to_int(mul(load(x + i), set1(s.inverse)));
        sum = add(sum, rounded);
        store(values + i, rounded);
      }
      const int total = hsum(sum), correction = -offset * total;
      const float shift_sum = s.scale * static_cast<float>(total);
      const void* place = traits.shifts ? static_cast<const void*>(&shift_sum) : &correction;
      std::memcpy(group + ((1 + p) * n + r) * sizeof(float), place, sizeof(float));
    }
    char* quads = group + size_t(n) * sizeof(float) * (1 + parts);
    for (int i = 0; i < kRowGroup; i += kBlockRun) {
      std::memcpy(quads + place_in_tile(i, r, n, kBlockRun), values + i, kBlockRun);
    }
  }
}

void put_head(char* head, int r, int n, float scale, const void* correction) {
  std::memcpy(head + r * sizeof(float), &scale, sizeof(float));
  std::memcpy(head + (n + r) * sizeof(float), correction, sizeof(float));
}

void quantize_row(const WeightFormat& format, const float* x, int k, int r, int n, char* tile) {
  const int offset = format.kind == WeightKind::kInt4 ? kNibbleZero : kQuadZero;
  const int groups = row_groups(k);
  if (format.kind == WeightKind::kInt8Channel) {
    const Scale s = find_scale(x, groups * kRowGroup);
    char* quads = tile + size_t(n) * kHeadBytes;
    I sum = set1_int(0);
    for (int i = 0; i < groups * kRowGroup; i += kRowGroup) {
      sum = add(sum, quantize_group<kChannelRun>(x + i, s.inverse, i, r, n, quads));
    }
    for (int i = groups * kRowGroup; i < channel_inputs(k); i += kRowGroup) {
      std::memset(quads + place_in_tile(i, r, n, kChannelRun), 0, kRowGroup);
    }
    const int correction = -offset * hsum(sum);
    put_head(tile, r, n, s.scale, &correction);
    return;
  }
  constexpr int kMost = GroupScales::kMost;
  for (int first = 0; first < groups; first += kMost, x += kMost * kRowGroup) {
    const int count = groups - first < kMost ? groups - first : kMost;
    GroupScales scales;
    find_scales<kMost>(x, count, scales);
    char* const heads = tile + size_t(first) * n * (kHeadBytes + kRowGroup);
    I sums[kMost];
    for (int g = 0; g < count; ++g) {
      char* group = heads + size_t(g) * n * (kHeadBytes + kRowGroup);
      sums[g] = quantize_group<kGroupRun>(x + g * kRowGroup, scales.inverse[g], 0, r, n, group + size_t(n) * kHeadBytes);
    }
    for (int g = count; g < kMost; ++g) sums[g] = set1_int(0);
    int32_t totals[kMost];
    store_sums<kMost>(sums, count, totals);
    for (int g = 0; g < count; ++g) {
      char* group = heads + size_t(g) * n * (kHeadBytes + kRowGroup);
      const int correction = -offset * totals[g];
      const float shift_sum = scales.scale[g] * static_cast<float>(totals[g]);
      put_head(group, r, n, scales.scale[g], format.zero_points ? static_cast<const void*>(&shift_sum) : &correction);
    }
  }
}

}  // namespace

size_t row_bytes(const WeightFormat& format, int k) {
  switch (format.kind) {
    case WeightKind::kTable4:
    case WeightKind::kFloat32: return sizeof(Element<float>::Activation) * k;
    case WeightKind::kE4m3:
    case WeightKind::kBFloat16: return sizeof(Element<bf16>::Activation) * float_steps<bf16>(k) * Element<bf16>::kStep;
    case WeightKind::kFloat16: return sizeof(Element<f16>::Activation) * k;
    case WeightKind::kInt8Channel: return kHeadBytes + channel_inputs(k);
    case WeightKind::kInt8:
    case WeightKind::kInt4: return size_t(row_groups(k)) * (kHeadBytes + kRowGroup);
    default: return block_row_bytes(format, k);
  }
}

void pack_inputs(const WeightFormat& format, const PackInputsArgs& args, int row_begin, int row_end) {
  const int padded = row_groups(args.k) * kRowGroup;
  const size_t bytes = row_bytes(format, args.k);
  const int tile_rows = packed_rows(format.kind);
  for (int i = args.k; i < padded; ++i) args.scratch[i] = 0.0f;
  for (int row = row_begin; row < row_end; ++row) {
    const float* x = args.x + (args.gather ? args.gather[row] : row) * args.x_stride;
    if (args.norm.kind != NormKind::kNone) {
      normalize_to(args.norm, x, args.k, args.scratch);
      x = args.scratch;
    } else if (padded != args.k) {
      std::memcpy(args.scratch, x, sizeof(float) * args.k);
      x = args.scratch;
    }
    const int r = row % tile_rows, n = args.num_rows - (row - r) < tile_rows ? args.num_rows - (row - r) : tile_rows;
    char* tile = static_cast<char*>(args.out) + (row - r) * bytes;
    switch (format.kind) {
      case WeightKind::kTable4:
      case WeightKind::kFloat32: round_row<float>(x, args.k, r, n, tile); break;
      case WeightKind::kE4m3:
      case WeightKind::kBFloat16: round_row<bf16>(x, args.k, r, n, tile); break;
      case WeightKind::kFloat16: round_row<f16>(x, args.k, r, n, tile); break;
      case WeightKind::kInt8:
      case WeightKind::kInt8Channel:
      case WeightKind::kInt4: quantize_row(format, x, args.k, r, n, tile); break;
      default: quantize_blocks_row(format, x, args.k, r, n, tile); break;
    }
  }
}

}  // namespace tidewheel::TW_ISA
