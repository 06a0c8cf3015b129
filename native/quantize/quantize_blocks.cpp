// Quantizes blocks of GGUF's types: chooses codes and scales so that the weighted sum of squared errors is small.
//
// First each sub-block alone finds the scale, and where the type has it the minimum, that is best without rounding. Then
// the block's own scales are chosen, and in turns: the numbers of few bits that multiply them, each among its
// neighbours, and the codes; then the block's scales that fit those best. What is kept is the turn with the least error,
// measured with all rounding.
//
// Lanes are sub-blocks, and no operation is fused: every ISA level stores the same bits.
#include "kernels/table.h"
#include "quantize/affine.h"
#include "quantize/block_writer.h"
#include "quantize/scaled.h"

namespace tidewheel::TW_ISA {
namespace {

Starts starts_of(BlockType type, Effort effort) {
  const bool fast = effort == Effort::kFast;
  switch (type) {
    case BlockType::kQ8_0: return fast ? Starts{8, 1.05f, 0.97f, 0, 0, 0, 1, 1} : Starts{24, 1.1f, 0.95f, 0, 0, 0, 2, 1};
    case BlockType::kQ6K: return fast ? Starts{12, 1.15f, 0.88f, 0, 0, 0, 1, 2} : Starts{24, 1.15f, 0.85f, 0, 0, 0, 2, 3};
    case BlockType::kQ5_0:
      return fast ? Starts{6, 1.08f, 0.85f, 2, 1.1f, 0.95f, 1, 1} : Starts{12, 1.1f, 0.8f, 12, 1.15f, 0.8f, 2, 1};
    case BlockType::kQ3K:
      return fast ? Starts{6, 1.05f, 0.75f, 6, 1.3f, 0.9f, 1, 2} : Starts{12, 1.1f, 0.7f, 12, 1.4f, 0.8f, 2, 4};
    case BlockType::kQ4_0:
    case BlockType::kIq4Nl:
    case BlockType::kIq4Xs:
      return fast ? Starts{6, 1.1f, 0.75f, 6, 1.2f, 0.85f, 1, 2} : Starts{12, 1.1f, 0.75f, 12, 1.2f, 0.85f, 2, 4};
    case BlockType::kQ5K:
    case BlockType::kQ5_1: return fast ? Starts{6, 1.02f, 0.86f, 0, 0, 0, 2, 2} : Starts{16, 1.04f, 0.8f, 0, 0, 0, 4, 4};
    case BlockType::kQ2K: return fast ? Starts{6, 1.05f, 0.6f, 0, 0, 0, 3, 2} : Starts{16, 1.1f, 0.4f, 0, 0, 0, 4, 4};
    default: return fast ? Starts{6, 1.04f, 0.72f, 0, 0, 0, 3, 2} : Starts{18, 1.04f, 0.7f, 0, 0, 0, 4, 4};
  }
}

template <typename Body>
TW_INLINE void each_lane(Body&& body) {
  for (int lane = 0; lane < kBatch; lane += kLanes) body(lane);
}

// The numbers of few bits that a block's scales are multiplied by, and the error of each lane with them.
struct Multiples {
  PerLane scale, min, error;
};

template <typename B>
float block_error(const Multiples& found, int block) {
  float sum = 0;
  for (int s = 0; s < B::kSubs; ++s) sum += found.error.v[block * B::kSubs + s];
  return sum;
}

template <typename B>
void take_block(const Multiples& from, int block, Multiples& to) {
  for (int i = block * B::kSubs; i < (block + 1) * B::kSubs; ++i) {
    to.scale.v[i] = from.scale.v[i];
    to.min.v[i] = from.min.v[i];
    to.error.v[i] = from.error.v[i];
  }
}

template <typename B>
void spread(const float* of_blocks, PerLane& lanes) {
  for (int i = 0; i < kBatch; ++i) lanes.v[i] = of_blocks[i / B::kSubs];
}

// x = d * scale * q - dmin * min, with scales and minima from 0 to LEVELS.
template <typename B, int MAX, int LEVELS>
struct AffineBlocks {
  using Lanes = LineLanes<B::kSize, MAX, true>;

  float d[B::kBlocks] = {}, dmin[B::kBlocks] = {};
  Multiples best{};

  void search(const B& batch, const Starts& starts) {
    PerLane scale, offset;
    each_lane([&](int lane) {
      const Line line = Lanes(batch, lane).search(starts);
      store(scale.v + lane, line.scale);
      store(offset.v + lane, line.offset);
    });
    float turn_d[B::kBlocks], turn_dmin[B::kBlocks];
    for (int b = 0; b < B::kBlocks; ++b) {
      float largest = 0, lowest = 0;
      for (int i = b * B::kSubs; i < (b + 1) * B::kSubs; ++i) {
        if (scale.v[i] > largest) largest = scale.v[i];
        if (offset.v[i] < lowest) lowest = offset.v[i];
      }
      turn_d[b] = half_of(largest / LEVELS);
      turn_dmin[b] = half_of(-lowest / LEVELS);
    }
    for (int turn = 0; turn < starts.turns; ++turn) {
      Multiples found;
      round_lines(batch, scale, offset, turn_d, turn_dmin, found);
      for (int b = 0; b < B::kBlocks; ++b) {
        if (turn > 0 && !(block_error<B>(found, b) < block_error<B>(best, b))) continue;
        take_block<B>(found, b, best);
        d[b] = turn_d[b], dmin[b] = turn_dmin[b];
      }
      if (turn + 1 < starts.turns) fit_blocks(batch, found, turn_d, turn_dmin, scale, offset);
    }
  }

  void put_codes(B& batch) const {
    PerLane all_d, all_dmin;
    spread<B>(d, all_d);
    spread<B>(dmin, all_dmin);
    each_lane([&](int lane) {
      Lanes(batch, lane).put_codes(line_of(all_d, all_dmin, best, lane), batch, lane);
    });
  }

 private:
  static Line line_of(const PerLane& d, const PerLane& dmin, const Multiples& by, int lane) {
    return {mul(load(d.v + lane), load(by.scale.v + lane)),
            sub(zero(), mul(load(dmin.v + lane), load(by.min.v + lane)))};
  }

  // Tries the scale's nearest neighbours, and for each the minimum that fits the codes best.
  static void round_lines(const B& batch, const PerLane& scale, const PerLane& offset, const float* d,
                          const float* dmin, Multiples& found) {
    PerLane all_d, all_dmin;
    spread<B>(d, all_d);
    spread<B>(dmin, all_dmin);
    each_lane([&](int lane) {
      const Lanes lanes(batch, lane);
      const F unit = load(all_d.v + lane), min_unit = load(all_dmin.v + lane);
      const F per_min = sub(zero(), inverse_or_zero(min_unit));
      const F ideal = load(scale.v + lane), start = load(offset.v + lane);
      const F nearest = round(clamp(mul(ideal, inverse_or_zero(unit)), 0.0f, LEVELS));
      F least = set1(INFINITY), best_scale = zero(), best_min = zero();
      for (const float step : {0.0f, -1.0f, 1.0f}) {
        const F multiple = clamp(add(nearest, set1(step)), 0.0f, LEVELS), exact = mul(unit, multiple);
        const F moved = add(start, mul(sub(ideal, exact), set1(0.5f * MAX)));
        F min = round(clamp(mul(moved, per_min), 0.0f, LEVELS));
        const LineSums sums = lanes.sums_of({exact, sub(zero(), mul(min_unit, min))});
        min = round(clamp(mul(lanes.offset_for(exact, sums), per_min), 0.0f, LEVELS));
        const F error = lanes.error_of({exact, sub(zero(), mul(min_unit, min))});
        best_scale = select_less(error, least, multiple, best_scale);
        best_min = select_less(error, least, min, best_min);
        least = tidewheel::TW_ISA::min(error, least);
      }
      store(found.scale.v + lane, best_scale);
      store(found.min.v + lane, best_min);
      store(found.error.v + lane, least);
    });
  }

  // The scales of blocks with the least sum of squares for the codes and multiples found, and the lines that fit those
  // codes.
  static void fit_blocks(const B& batch, const Multiples& found, float* d, float* dmin, PerLane& scale,
                         PerLane& offset) {
    PerLane all_d, all_dmin, q, qq, qx, sum_w, sum_x;
    spread<B>(d, all_d);
    spread<B>(dmin, all_dmin);
    each_lane([&](int lane) {
      const Lanes lanes(batch, lane);
      const LineSums sums = lanes.sums_of(line_of(all_d, all_dmin, found, lane));
      const Line line = lanes.fit(sums);
      store(scale.v + lane, line.scale);
      store(offset.v + lane, line.offset);
      store(q.v + lane, sums.q);
      store(qq.v + lane, sums.qq);
      store(qx.v + lane, sums.qx);
      store(sum_w.v + lane, lanes.sum_w());
      store(sum_x.v + lane, lanes.sum_x());
    });
    for (int b = 0; b < B::kBlocks; ++b) {
      float aa = 0, ab = 0, bb = 0, ax = 0, bx = 0;
      for (int i = b * B::kSubs; i < (b + 1) * B::kSubs; ++i) {
        const float s = found.scale.v[i], m = found.min.v[i];
        aa += s * s * qq.v[i];
        ab += s * m * q.v[i];
        bb += m * m * sum_w.v[i];
        ax += s * qx.v[i];
        bx += m * sum_x.v[i];
      }
      const float determinant = aa * bb - ab * ab;
      if (determinant > 1e-6f * aa * bb) {
        const float fitted = (ax * bb - ab * bx) / determinant, fitted_min = (ax * ab - aa * bx) / determinant;
        if (fitted > 0 && fitted_min > 0) d[b] = half_of(fitted), dmin[b] = half_of(fitted_min);
      } else if (aa > 0 && ax > 0 && bb == 0) {
        d[b] = half_of(ax / aa);
      }
    }
  }
};

// x = d * scale * q, with whole scales from -LEVELS to LEVELS - 1.
template <typename B, typename Codes, int LEVELS>
struct ScaledBlocks {
  using Lanes = ScaleLanes<B::kSize, Codes>;

  float d[B::kBlocks] = {};
  Multiples best{};

  void search(const B& batch, const Starts& starts) {
    PerLane scale;
    each_lane([&](int lane) {
      store(scale.v + lane, Lanes(batch, lane).search(starts));
    });
    float turn_d[B::kBlocks];
    for (int b = 0; b < B::kBlocks; ++b) {
      float low = 0, high = 0;
      for (int i = b * B::kSubs; i < (b + 1) * B::kSubs; ++i) {
        if (scale.v[i] < low) low = scale.v[i];
        if (scale.v[i] > high) high = scale.v[i];
      }
      turn_d[b] = half_of((high < -low ? low : high) / -LEVELS);
    }
    for (int turn = 0; turn < starts.turns; ++turn) {
      Multiples found;
      round_scales(batch, scale, turn_d, found);
      for (int b = 0; b < B::kBlocks; ++b) {
        if (turn > 0 && !(block_error<B>(found, b) < block_error<B>(best, b))) continue;
        take_block<B>(found, b, best);
        d[b] = turn_d[b];
      }
      if (turn + 1 < starts.turns) fit_blocks(batch, found, turn_d, scale);
    }
  }

  void put_codes(B& batch) const {
    PerLane all_d;
    spread<B>(d, all_d);
    each_lane([&](int lane) {
      Lanes(batch, lane).put_codes(mul(load(all_d.v + lane), load(best.scale.v + lane)), batch, lane);
    });
  }

 private:
  static void round_scales(const B& batch, const PerLane& scale, const float* d, Multiples& found) {
    PerLane all_d;
    spread<B>(d, all_d);
    each_lane([&](int lane) {
      const Lanes lanes(batch, lane);
      const F unit = load(all_d.v + lane);
      const F nearest = round(clamp(mul(load(scale.v + lane), inverse_or_zero(unit)), -LEVELS, LEVELS - 1));
      F least = set1(INFINITY), best_scale = zero();
      for (const float step : {0.0f, -1.0f, 1.0f}) {
        const F multiple = clamp(add(nearest, set1(step)), -LEVELS, LEVELS - 1);
        const F error = lanes.error_of(mul(unit, multiple));
        best_scale = select_less(error, least, multiple, best_scale);
        least = min(error, least);
      }
      store(found.scale.v + lane, best_scale);
      store(found.min.v + lane, zero());
      store(found.error.v + lane, least);
    });
  }

  static void fit_blocks(const B& batch, const Multiples& found, float* d, PerLane& scale) {
    PerLane all_d, qq, qx;
    spread<B>(d, all_d);
    each_lane([&](int lane) {
      const ScaleSums sums = Lanes(batch, lane).sums_of(mul(load(all_d.v + lane), load(found.scale.v + lane)));
      store(scale.v + lane, mul(sums.qx, inverse_or_zero(sums.qq)));
      store(qq.v + lane, sums.qq);
      store(qx.v + lane, sums.qx);
    });
    for (int b = 0; b < B::kBlocks; ++b) {
      float squares = 0, products = 0;
      for (int i = b * B::kSubs; i < (b + 1) * B::kSubs; ++i) {
        squares += found.scale.v[i] * found.scale.v[i] * qq.v[i];
        products += found.scale.v[i] * qx.v[i];
      }
      if (squares > 0) d[b] = half_of(products / squares);
    }
  }
};

template <typename B>
void codes_of(const B& batch, int block, int bias, uint8_t* codes) {
  for (int s = 0; s < B::kSubs; ++s) {
    for (int i = 0; i < B::kSize; ++i) {
      codes[s * B::kSize + i] = static_cast<uint8_t>(static_cast<int>(batch.q[i].v[block * B::kSubs + s]) + bias);
    }
  }
}

// The number of each of the table's values, by value + 127.
struct TableCodes {
  uint8_t codes[256] = {};
  constexpr TableCodes() {
    for (int i = 0; i < 16; ++i) codes[static_cast<int>(Unevenly::kValues[i]) + 127] = static_cast<uint8_t>(i);
  }
};
constexpr TableCodes kTableCodes;

template <typename B>
void table_codes_of(const B& batch, int block, uint8_t* codes) {
  codes_of(batch, block, 127, codes);
  for (int i = 0; i < B::kSize * B::kSubs; ++i) codes[i] = kTableCodes.codes[codes[i]];
}

template <typename B>
void multiples_of(const PerLane& lanes, int block, int bias, uint8_t* to) {
  for (int s = 0; s < B::kSubs; ++s) {
    to[s] = static_cast<uint8_t>(static_cast<int>(lanes.v[block * B::kSubs + s]) + bias);
  }
}

using Blocks32 = Batch<32, 1>;
using SuperBlocks32 = Batch<32, 8>;
using SuperBlocks16 = Batch<16, 16>;

// Calls `each(batch, count, out)` for all blocks, a batch at a time.
template <typename B, typename Each>
void each_batch(const QuantizeArgs& args, int bytes, Each&& each) {
  B batch;
  for (int64_t block = args.block_begin; block < args.block_end; block += B::kBlocks) {
    const int64_t left = args.block_end - block;
    const int count = left < B::kBlocks ? static_cast<int>(left) : B::kBlocks;
    batch.read(args, block, count);
    each(batch, count, args.out + block * bytes);
  }
}

template <typename Codes, typename Put>
void quantize_scaled(const QuantizeArgs& args, const Starts& starts, int bytes, Put&& put) {
  each_batch<Blocks32>(args, bytes, [&](Blocks32& batch, int count, uint8_t* out) {
    PerLane scale;
    each_lane([&](int lane) {
      const ScaleLanes<32, Codes> lanes(batch, lane);
      const F found = lanes.search_half(starts);
      lanes.put_codes(found, batch, lane);
      store(scale.v + lane, found);
    });
    for (int b = 0; b < count; ++b) put(batch, b, scale.v[b], out + b * bytes);
  });
}

template <int MAX>
void quantize_lines(const QuantizeArgs& args, const Starts& starts, int bytes) {
  each_batch<Blocks32>(args, bytes, [&](Blocks32& batch, int count, uint8_t* out) {
    PerLane scale, offset;
    each_lane([&](int lane) {
      const LineLanes<32, MAX, false> lanes(batch, lane);
      Line line = lanes.search(starts);
      line.scale = half_of(line.scale);
      line.offset = half_of(line.offset);
      F least = lanes.error_of(line);
      for (int turn = 0; turn < starts.turns; ++turn) {
        const LineSums sums = lanes.sums_of(line);
        const F fitted = half_of(lanes.offset_for(line.scale, sums)), error = lanes.error_of({line.scale, fitted});
        line.offset = select_less(error, least, fitted, line.offset);
        least = min(error, least);
      }
      lanes.put_codes(line, batch, lane);
      store(scale.v + lane, line.scale);
      store(offset.v + lane, line.offset);
    });
    for (int b = 0; b < count; ++b) {
      uint8_t codes[32];
      codes_of(batch, b, 0, codes);
      uint8_t* to = out + b * bytes;
      put_half(to, scale.v[b]);
      put_half(to + 2, offset.v[b]);
      put_small_block(to + 4, codes, MAX > 15);
    }
  });
}

template <typename B, int MAX, int LEVELS, typename Put>
void quantize_affine(const QuantizeArgs& args, const Starts& starts, int bytes, Put&& put) {
  each_batch<B>(args, bytes, [&](B& batch, int count, uint8_t* out) {
    AffineBlocks<B, MAX, LEVELS> found;
    found.search(batch, starts);
    found.put_codes(batch);
    for (int b = 0; b < count; ++b) {
      uint8_t codes[256], scales[B::kSubs], minima[B::kSubs];
      codes_of(batch, b, 0, codes);
      multiples_of<B>(found.best.scale, b, 0, scales);
      multiples_of<B>(found.best.min, b, 0, minima);
      put(out + b * bytes, found.d[b], found.dmin[b], scales, minima, codes);
    }
  });
}

template <typename B, typename Codes, int LEVELS, typename Put>
void quantize_scaled_blocks(const QuantizeArgs& args, const Starts& starts, int bytes, Put&& put) {
  each_batch<B>(args, bytes, [&](B& batch, int count, uint8_t* out) {
    ScaledBlocks<B, Codes, LEVELS> found;
    found.search(batch, starts);
    found.put_codes(batch);
    for (int b = 0; b < count; ++b) put(batch, b, found.best.scale, found.d[b], out + b * bytes);
  });
}

}  // namespace

void quantize_blocks(const QuantizeArgs& args) {
  const int bytes = block_type_info(args.type).bytes;
  const Starts starts = starts_of(args.type, args.effort);
  switch (args.type) {
    case BlockType::kQ8_0:
      return quantize_scaled<Evenly<-127, 127>>(args, starts, bytes, [](auto& batch, int b, float d, uint8_t* to) {
        put_half(to, d);
        codes_of(batch, b, 0, to + 2);
      });
    case BlockType::kQ4_0:
      return quantize_scaled<Evenly<-8, 7>>(args, starts, bytes, [](auto& batch, int b, float d, uint8_t* to) {
        uint8_t codes[32];
        codes_of(batch, b, 8, codes);
        put_half(to, d);
        put_small_block(to + 2, codes, false);
      });
    case BlockType::kQ5_0:
      return quantize_scaled<Evenly<-16, 15>>(args, starts, bytes, [](auto& batch, int b, float d, uint8_t* to) {
        uint8_t codes[32];
        codes_of(batch, b, 16, codes);
        put_half(to, d);
        put_small_block(to + 2, codes, true);
      });
    case BlockType::kIq4Nl:
      return quantize_scaled<Unevenly>(args, starts, bytes, [](auto& batch, int b, float d, uint8_t* to) {
        uint8_t codes[32];
        table_codes_of(batch, b, codes);
        put_half(to, d);
        put_small_block(to + 2, codes, false);
      });
    case BlockType::kQ4_1: return quantize_lines<15>(args, starts, bytes);
    case BlockType::kQ5_1: return quantize_lines<31>(args, starts, bytes);
    case BlockType::kQ2K:
      return quantize_affine<SuperBlocks16, 3, 15>(args, starts, bytes, [](auto... parts) { put_q2_k(parts...); });
    case BlockType::kQ4K:
      return quantize_affine<SuperBlocks32, 15, 63>(args, starts, bytes, [](auto... parts) { put_q4_k(parts...); });
    case BlockType::kQ5K:
      return quantize_affine<SuperBlocks32, 31, 63>(args, starts, bytes, [](auto... parts) { put_q5_k(parts...); });
    case BlockType::kQ3K:
      return quantize_scaled_blocks<SuperBlocks16, Evenly<-4, 3>, 32>(
          args, starts, bytes, [](auto& batch, int b, const PerLane& multiples, float d, uint8_t* to) {
            uint8_t codes[256], scales[16];
            codes_of(batch, b, 4, codes);
            multiples_of<SuperBlocks16>(multiples, b, 32, scales);
            put_q3_k(to, d, scales, codes);
          });
    case BlockType::kQ6K:
      return quantize_scaled_blocks<SuperBlocks16, Evenly<-32, 31>, 128>(
          args, starts, bytes, [](auto& batch, int b, const PerLane& multiples, float d, uint8_t* to) {
            uint8_t codes[256], scales[16];
            codes_of(batch, b, 32, codes);
            multiples_of<SuperBlocks16>(multiples, b, 0, scales);
            put_q6_k(to, d, scales, codes);
          });
    case BlockType::kIq4Xs:
      return quantize_scaled_blocks<SuperBlocks32, Unevenly, 32>(
          args, starts, bytes, [](auto& batch, int b, const PerLane& multiples, float d, uint8_t* to) {
            uint8_t codes[256], scales[8];
            table_codes_of(batch, b, codes);
            multiples_of<SuperBlocks32>(multiples, b, 32, scales);
            put_iq4_xs(to, d, scales, codes);
          });
    default: return;
  }
}

}  // namespace tidewheel::TW_ISA
