// A sequence in a paged cache, written by `store_qkv` and read back as the comments in kernels.h say it lies there.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include "support.h"

namespace tidewheel::test {

constexpr CacheType kAllCacheTypes[] = {CacheType::kFloat32, CacheType::kBFloat16, CacheType::kFloat16,
                                        CacheType::kFloat8E5M2, CacheType::kInt8, CacheType::kFloat8E4M3,
                                        CacheType::kInt4};

// Of these, the first ones are given to whole models. Kernels are tested with all of them on every processor.
#ifdef TIDEWHEEL_EMULATED
constexpr size_t kModelCacheTypes = 1;
#else
constexpr size_t kModelCacheTypes = std::size(kAllCacheTypes);
#endif

inline const char* name_of(CacheType type) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "fp8_e5m2", "int8", "fp8_e4m3", "int4"};
  return kNames[static_cast<int>(type)];
}

// Whether a type can cache the K and V of such heads.
inline bool caches(CacheType type, const Heads& heads) { return type != CacheType::kInt4 || !heads.values_in_keys(); }

// What `store_qkv` does to queries and keys besides.
struct Preparation {
  std::vector<float> q_norm, k_norm;  // [head_dim], or empty
  std::vector<float> cos, sin;        // [rotary pairs], the same for all tokens here
  bool interleaved = false;
  NormKind kind = NormKind::kRms;
  float k_scale = 1, v_scale = 1;
};

class CachedSequence {
 public:
  // Of a token's q, k and v.
  static size_t width(const Heads& heads) {
    return size_t(heads.num_heads + heads.num_kv_heads) * heads.head_dim + size_t(heads.num_kv_heads) * heads.values();
  }

  const Kernels& kernels;
  const CacheType type;
  const Heads heads;
  const int tokens;
  const float k_scale, v_scale;  // of e4m3
  std::vector<float> qkv;
  std::vector<int32_t> table;
  std::vector<char> cache, queries;

  CachedSequence(const Kernels& k, CacheType t, Heads h, std::vector<float> values, Preparation preparation = {})
      : kernels(k), type(t), heads(h), tokens(static_cast<int>(values.size() / width())),
        k_scale(preparation.k_scale), v_scale(preparation.v_scale), qkv(std::move(values)),
        table((tokens + kBlockTokens - 1) / kBlockTokens), cache((table.size() + 1) * heads.block_bytes(type), '\xff'),
        queries(tokens * query_stride() * unit()) {
    // The cache is full of NaN, which must not matter. Blocks are scattered: backwards, and block 0 is someone else's.
    std::iota(table.rbegin(), table.rend(), 1);
    const Norm q_norm = norm(preparation.kind, preparation.q_norm), k_norm = norm(preparation.kind, preparation.k_norm);
    for (int token = 0; token < tokens; ++token) {
      std::vector<float> row(qkv.begin() + token * width(), qkv.begin() + (token + 1) * width());
      kernels.store_qkv(type, {heads, 0, heads.num_kv_heads, row.data(), q_norm, k_norm, data(preparation.cos),
                               data(preparation.sin), static_cast<int>(preparation.cos.size()), preparation.interleaved,
                               queries.data() + token * query_stride() * unit(),
                               cache.data() + table[token / kBlockTokens] * heads.block_bytes(type), token % kBlockTokens,
                               1, 0, false, {}, false, k_scale, v_scale});
    }
  }

  size_t width() const { return width(heads); }
  size_t query_stride() const { return size_t(heads.num_heads) * heads.padded_dim(); }
  int unit() const { return kernels.query_bytes[static_cast<int>(type)]; }

  double q(int token, int head, int d) const {
    const size_t index = token * query_stride() + head * heads.padded_dim() + d;
    return unit() == 4 ? at<float>(queries.data(), index) : to_float(at<bf16>(queries.data(), index));
  }
  double k(int token, int kv_head, int d) const {
    if (type == CacheType::kInt4) {
      return nibble(token, kv_head, d / 2 * kBlockTokens + slot(token), d % 2) * scale(token, kv_head, 0, d);
    }
    const int s = slot(token), index = (d / step() * kBlockTokens + s) * step() + d % step();
    return element(token, kv_head, index) * scale(token, kv_head, 0);
  }
  double v(int token, int kv_head, int d) const {
    if (heads.values_in_keys()) return k(token, kv_head, heads.value_start + d);
    if (type == CacheType::kInt4) {
      const int byte = (d / kCacheGroup * kBlockTokens + slot(token)) * kCacheGroup / 2 + d % (kCacheGroup / 2);
      return nibble(token, kv_head, heads.padded_dim() * kBlockTokens / 2 + byte, d / (kCacheGroup / 2) % 2) *
             scale(token, kv_head, 1, d);
    }
    const int values = heads.padded_values(), s = slot(token);
    const int index = (s / step() * values + d) * step() + s % step();
    return element(token, kv_head, heads.padded_dim() * kBlockTokens + index) * scale(token, kv_head, 1);
  }
  // Of element d of K (0) or V (1); 1 for the types that have none.
  double scale(int token, int kv_head, int which, int d = 0) const {
    if (type == CacheType::kInt4) {
      const int groups = cache_groups(heads.padded_dim()), v_groups = cache_groups(heads.stored_values());
      const size_t codes = size_t(heads.padded_dim() + v_groups * kCacheGroup) * kBlockTokens / 2;
      const int group = (which ? groups : 0) + d / kCacheGroup;
      return to_float(at<f16>(head(token, kv_head) + codes, group * kBlockTokens + slot(token)));
    }
    if (type == CacheType::kFloat8E4M3) return which ? v_scale : k_scale;
    if (type != CacheType::kInt8) return 1.0;
    const char* scales = head(token, kv_head) + size_t(heads.padded_dim() + heads.stored_values()) * kBlockTokens;
    return at<float>(scales, which * kBlockTokens + slot(token));
  }

 private:
  template <typename T>
  static T at(const char* data, size_t index) {
    T value;
    std::memcpy(&value, data + index * sizeof(T), sizeof(T));
    return value;
  }
  static float* data(std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }
  static Norm norm(NormKind kind, std::vector<float>& weight) {
    return weight.empty() ? Norm{} : Norm{kind, 1e-5f, weight.data()};
  }
  static int slot(int token) { return token % kBlockTokens; }
  // How many elements lie side by side, for types whose elements are whole bytes.
  int step() const {
    if (type == CacheType::kInt8) return kernels.int8_step;
    return type == CacheType::kFloat32 || type == CacheType::kFloat16 ? 1 : 2;
  }
  const char* head(int token, int kv_head) const {
    return cache.data() + table[token / kBlockTokens] * heads.block_bytes(type) + kv_head * heads.head_bytes(type);
  }
  double nibble(int token, int kv_head, int byte, int which) const {
    const int code = static_cast<uint8_t>(head(token, kv_head)[byte]) >> 4 * which & 15;
    return code < 8 ? code : code - 16;
  }
  double element(int token, int kv_head, int index) const {
    const char* start = head(token, kv_head);
    switch (type) {
      case CacheType::kFloat32: return at<float>(start, index);
      case CacheType::kBFloat16: return to_float(at<bf16>(start, index));
      case CacheType::kFloat16: return to_float(at<f16>(start, index));
      case CacheType::kFloat8E5M2: return to_float(at<e5m2>(start, index));
      case CacheType::kInt8: return at<int8_t>(start, index);
      case CacheType::kFloat8E4M3: {
        const e4m3 x = at<e4m3>(start, index);
        return x.bits == kE4m3Nan ? std::numeric_limits<double>::quiet_NaN() : to_float(x);
      }
      case CacheType::kInt4: break;  // see `nibble`
    }
    return 0;
  }
};

}  // namespace tidewheel::test
