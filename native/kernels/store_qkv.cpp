// The work between the QKV projection and attention, one token at a time: q/k norm, rope, and writing to the cache.
#include <algorithm>

#include "kernels/cache.h"
#include "kernels/kernels.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

void rotate_halves(float* x, int pairs, const float* cos, const float* sin) {
  int i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const F a = load(x + i), b = load(x + pairs + i), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(x + pairs + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < pairs; ++i) {
    const float a = x[i], b = x[pairs + i];
    x[i] = a * cos[i] - b * sin[i];
    x[pairs + i] = b * cos[i] + a * sin[i];
  }
}

void rotate_interleaved(float* x, int pairs, const float* cos, const float* sin) {
  for (int i = 0; i < pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// Rounds to the nearest e5m2, ties to even. Too large numbers become the largest finite number. NaN stays NaN.
TW_INLINE void store(e5m2* p, F a) {
  const F bounded = max(set1(-57344.0f), min(set1(57344.0f), a));  // in this order NaN stays NaN
  // Adding 3 * 2^22 steps of a number's grid rounds it to whole steps, because the sum has no bits for smaller ones.
  // The smallest grid is 2^-16, where e5m2 becomes subnormal.
  const F shift = mul(max(binade(bounded), set1(0x1p-14f)), set1(0x1.8p21f));
  f16 half[kLanes];
  store(half, sub(add(bounded, shift), shift));
  for (int i = 0; i < kLanes; ++i) p[i] = {static_cast<uint8_t>(half[i].bits >> 8)};
}

// The same for e4m3, whose smallest grid is 2^-9.
TW_INLINE void store(e4m3* p, F a) {
  const F bounded = max(set1(-448.0f), min(set1(448.0f), a));
  const F shift = mul(max(binade(bounded), set1(0x1p-6f)), set1(0x1.8p20f));
  f16 half[kLanes];  // in binary16, a 256th has the same exponent and mantissa bits
  store(half, mul(sub(add(bounded, shift), shift), set1(0x1p-8f)));
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t bits = half[i].bits;
    p[i] = {static_cast<uint8_t>((bits & 0x7fff) > 0x7c00 ? kE4m3Nan : (bits >> 8 & 0x80) | (bits >> 7 & 0x7f))};
  }
}

TW_INLINE void store(int8_t* p, F a) {
  store(p, round_to_int(min(max(a, set1(-127.0f)), set1(127.0f))));  // in this order NaN becomes a number
}

// Calls body(d, the elements from d on) for a whole padded head. The elements after the end of `x` are zeros.
template <typename Body>
TW_INLINE void each_vector(const float* x, int dim, int padded, Body&& body) {
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) body(d, load(x + d));
  if (d == padded) return;
  float tail[kLanes] = {};
  for (int i = 0; d + i < dim; ++i) tail[i] = x[d + i];
  body(d, load(tail));
  for (d += kLanes; d < padded; d += kLanes) body(d, zero());
}

// The scale that makes the largest magnitude 127. A head that is too small to divide by is stored as zeros. If any
// value is not finite, the scale is NaN, and so is every value that is read back.
float int8_scale(const float* x, int dim, int padded) {
  F largest = zero(), poison = zero();
  each_vector(x, dim, padded, [&](int, F a) {
    largest = max(abs(a), largest);
    poison = fma(a, zero(), poison);
  });
  const float absmax = hmax(largest);
  return (absmax < 0x1p-100f ? 0.0f : absmax / 127.0f) + hsum(poison);
}

// Quantizes one token's K or V in groups that each have a scale: the element with the largest magnitude becomes -8.
// Calls `put(group, codes [kCacheGroup], scale)`. If any element of a group is not finite, its scale is NaN.
template <typename Put>
TW_INLINE void quantize_int4(const float* x, int dim, Put&& put) {
  for (int group = 0; group < cache_groups(dim); ++group) {
    float elements[kCacheGroup] = {};
    std::memcpy(elements, x + group * kCacheGroup, sizeof(float) * std::min(kCacheGroup, dim - group * kCacheGroup));
    F highest = zero(), lowest = zero(), poison = zero();
    for (int i = 0; i < kCacheGroup; i += kLanes) {
      const F a = load(elements + i);
      highest = max(a, highest);
      lowest = max(sub(zero(), a), lowest);
      poison = fma(a, zero(), poison);
    }
    const float above = hmax(highest), below = hmax(lowest);
    const f16 scale = to_f16((above >= below ? above : -below) / -8.0f + hsum(poison));
    const float step = to_float(scale);
    const F factor = set1(step != 0 ? 1.0f / step : 0.0f);
    int8_t codes[kCacheGroup];
    for (int i = 0; i < kCacheGroup; i += kLanes) {
      store(codes + i, round_to_int(min(max(mul(load(elements + i), factor), set1(-8.0f)), set1(7.0f))));
    }
    put(group, codes, scale);
  }
}

uint8_t two_codes(int8_t low, int8_t high) { return static_cast<uint8_t>((low & 15) | (high & 15) << 4); }

void store_int4(const CachedInt4Head& head, int slot, const float* k, int dim, const float* v, int values) {
  quantize_int4(k, dim, [&](int group, const int8_t* codes, f16 scale) {
    head.k_scales(group)[slot] = scale;
    const int begin = group * kCacheGroup;
    for (int i = 0; i < kCacheGroup && begin + i < head.dim; i += 2) {
      *head.k_pair(slot, begin + i) = two_codes(codes[i], codes[i + 1]);
    }
  });
  quantize_int4(v, values, [&](int group, const int8_t* codes, f16 scale) {
    head.v_scales(group)[slot] = scale;
    uint8_t* const bytes = head.v_group(slot, group);
    for (int i = 0; i < kCacheGroup / 2; ++i) bytes[i] = two_codes(codes[i], codes[i + kCacheGroup / 2]);
  });
}

// Stores one token's K and V of a head, for all types but int4.
template <typename T>
void store_elements(const StoreQkvArgs& args, const CachedHead<T>& head, const float* k, const float* v) {
  using C = Cached<T>;
  const int dim = args.heads.head_dim, values = args.heads.values(), padded = head.dim, stored_values = head.values;
  F k_factor = set1(1.0f), v_factor = set1(1.0f);
  if constexpr (kHasScales<T>) {
    const auto scaled = [](const float* x, int size, int size_padded, float& scale) {
      scale = int8_scale(x, size, size_padded);
      return set1(scale > 0 ? 1.0f / scale : 0.0f);
    };
    k_factor = scaled(k, dim, padded, head.k_scales()[args.slot]);
    if (stored_values) v_factor = scaled(v, values, stored_values, head.v_scales()[args.slot]);
  }
  if constexpr (C::kType == CacheType::kFloat8E4M3) k_factor = set1(args.k_scale), v_factor = set1(args.v_scale);
  const auto quantized = [](F a, F factor) {
    if constexpr (C::kType == CacheType::kFloat8E4M3) return div(a, factor);
    return kHasScales<T> ? mul(a, factor) : a;
  };
  T rounded[kLanes];
  each_vector(k, dim, padded, [&](int d, F a) {
    store(rounded, quantized(a, k_factor));
    for (int i = 0; i < kLanes; i += C::kStep) {
      std::memcpy(head.k_step(args.slot, d + i), rounded + i, C::kStep * sizeof(T));
    }
  });
  if (!stored_values) return;
  each_vector(v, values, stored_values, [&](int d, F a) {
    store(rounded, quantized(a, v_factor));
    // One by one, because the elements between belong to other tokens, which another worker may be writing.
    for (int i = 0; i < kLanes; ++i) *head.v_element(args.slot, d + i) = rounded[i];
  });
}

template <typename T>
void store_typed(const StoreQkvArgs& args) {
  using C = Cached<T>;
  const Heads& heads = args.heads;
  const int dim = heads.head_dim, padded = heads.padded_dim(), values = heads.values(), stored_values = heads.stored_values();
  const size_t head_bytes = heads.head_bytes(C::kType);
  const int q_begin = args.kv_begin * heads.group(), q_end = args.kv_end * heads.group();
  const auto turn = [&](float* x, Norm norm, int head) {
    if (norm.weight) norm.weight += head * args.norm_stride;
    if (norm.bias) norm.bias += head * args.norm_stride;
    const bool has_norm = norm.kind != NormKind::kNone;
    if (has_norm && !args.norm_after_rope) normalize(norm, x, dim);
    if (args.cos) (args.interleaved ? rotate_interleaved : rotate_halves)(x, args.rotary_pairs, args.cos, args.sin);
    if (has_norm && args.norm_after_rope) normalize(norm, x, dim);
  };
  const F q_scale = set1(args.q_scale);
  for (int h = q_begin; h < q_end; ++h) {
    turn(args.qkv + h * dim, args.q_norm, h);
    auto* q = static_cast<typename C::Query*>(args.q) + h * padded;
    each_vector(args.qkv + h * dim, dim, padded, [&](int d, F a) { store(q + d, mul(a, q_scale)); });
  }
  if (!args.cache_heads) return;
  for (int h = args.kv_begin; h < args.kv_end; ++h) {
    float* k = args.qkv + (heads.num_heads + h) * dim;
    float* v = args.qkv + (heads.num_heads + heads.num_kv_heads) * dim + h * values;
    if (args.values_from_keys) std::memcpy(v, k, sizeof(float) * values);
    if (stored_values && args.v_norm.kind != NormKind::kNone) normalize(args.v_norm, v, values);
    turn(k, args.k_norm, h);
    char* const start = static_cast<char*>(args.cache_heads) + (h - args.kv_begin) * head_bytes;
    if constexpr (C::kType == CacheType::kInt4) {
      store_int4({reinterpret_cast<uint8_t*>(start), padded, stored_values}, args.slot, k, dim, v, values);
    } else {
      store_elements<T>(args, {reinterpret_cast<T*>(start), padded, stored_values}, k, v);
    }
  }
}

}  // namespace

void store_qkv(CacheType type, const StoreQkvArgs& args) {
  with_cached(type, [&]<typename T>(T*) { store_typed<T>(args); });
}

}  // namespace tidewheel::TW_ISA
