// Packs rows of quantized files into panels, bit for bit.
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has the layouts of GGUF's blocks. Numbers in the
// functions below are offsets of their fields.
#include "kernels/block_formats.h"
#include "kernels/blocks.h"
#include "kernels/lanes.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

// A row's chunk: codes in the order of inputs, and the fields of its header in the order in which they are packed.
struct Chunk {
  uint8_t codes[kChunkInputs];
  f16 halves[2 * kChunkGroups];
  float words[kChunkGroups];
  uint8_t bytes[2 * kChunkGroups];
};

TW_INLINE f16 half_at(const uint8_t* p) { return {static_cast<uint16_t>(p[0] | p[1] << 8)}; }

constexpr uint64_t kOnes = ~uint64_t{0} / 255;  // 1 in every byte

// As much as is extracted at a time. gcc 12 would take 16 bytes apart.
using Words16 = uint64_t __attribute__((vector_size(16)));
using Words32 = uint64_t __attribute__((vector_size(32)));

// Fields of BITS bits of some bytes, those from bit `shift` on.
template <int BITS, typename Words>
TW_INLINE void take_fields(const uint8_t* bytes, int shift, Words& fields) {
  std::memcpy(&fields, bytes, sizeof fields);
  fields = fields >> shift & kOnes * ((1 << BITS) - 1);
}

// Extracts fields of BITS bits from COUNT bytes: first the lowest field of every byte, then the next one, and so on.
template <int BITS, typename Words, size_t COUNT = sizeof(Words)>
TW_INLINE void spread(const uint8_t* bytes, uint8_t* codes) {
  for (int shift = 0; shift < 8; shift += BITS) {
    for (size_t i = 0; i < COUNT; i += sizeof(Words), codes += sizeof(Words)) {
      Words fields;
      take_fields<BITS>(bytes + i, shift, fields);
      std::memcpy(codes, &fields, sizeof fields);
    }
  }
}
// The same for 32 bytes, but adds the fields to `codes` as bits SHIFT and above.
template <int BITS, int SHIFT>
TW_INLINE void add_bits(const uint8_t* bytes, uint8_t* codes) {
  for (int shift = 0; shift < 8; shift += BITS, codes += 32) {
    Words32 words, fields;
    std::memcpy(&words, codes, sizeof words);
    take_fields<BITS>(bytes, shift, fields);
    words |= fields << SHIFT;
    std::memcpy(codes, &words, sizeof words);
  }
}

// Adds the fifth bits of 32 codes. The first code's is the lowest bit.
TW_INLINE void add_fifth_bits(const uint8_t* bytes, uint8_t* codes) {
  constexpr uint64_t kOwnBit = kLittleEndian ? 0x8040201008040201 : 0x0102040810204080;  // bit i of code i
  for (int i = 0; i < 4; ++i) {
    const uint64_t own = bytes[i] * kOnes & kOwnBit, top = own | ((own & kOnes * 0x7f) + kOnes * 0x7f);
    uint64_t eight;
    std::memcpy(&eight, codes + i * 8, sizeof eight);
    eight |= (top >> 7 & kOnes) << 4;
    std::memcpy(codes + i * 8, &eight, sizeof eight);
  }
}

// Reads one block of 256 inputs, or `groups` blocks of 32.
void read_blocks(BlockType type, const uint8_t* b, int groups, Chunk& chunk) {
  uint8_t* codes = chunk.codes;
  switch (type) {
    case BlockType::kQ4_0:
    case BlockType::kIq4Nl:
      for (int g = 0; g < groups; ++g, b += 18, codes += 32) {
        chunk.halves[g] = half_at(b);
        spread<4, Words16>(b + 2, codes);
      }
      return;
    case BlockType::kQ4_1:
      for (int g = 0; g < groups; ++g, b += 20, codes += 32) {
        chunk.halves[g] = half_at(b);
        chunk.halves[groups + g] = half_at(b + 2);
        spread<4, Words16>(b + 4, codes);
      }
      return;
    case BlockType::kQ5_0:
      for (int g = 0; g < groups; ++g, b += 22, codes += 32) {
        chunk.halves[g] = half_at(b);
        spread<4, Words16>(b + 6, codes);
        add_fifth_bits(b + 2, codes);
      }
      return;
    case BlockType::kQ5_1:
      for (int g = 0; g < groups; ++g, b += 24, codes += 32) {
        chunk.halves[g] = half_at(b);
        chunk.halves[groups + g] = half_at(b + 2);
        spread<4, Words16>(b + 8, codes);
        add_fifth_bits(b + 4, codes);
      }
      return;
    case BlockType::kQ8_0:
      for (int g = 0; g < groups; ++g, b += 34, codes += 32) {
        chunk.halves[g] = half_at(b);
        for (int i = 0; i < 32; ++i) codes[i] = b[2 + i] ^ 0x80;
      }
      return;
    case BlockType::kMxfp4:
      for (int g = 0; g < groups; ++g, b += 17, codes += 32) {
        chunk.bytes[g] = b[0];
        spread<4, Words16>(b + 1, codes);
      }
      return;
    case BlockType::kQ2K:
      std::memcpy(chunk.bytes, b, 16);
      chunk.halves[0] = half_at(b + 80);
      chunk.halves[1] = half_at(b + 82);
      for (int n = 0; n < 2; ++n) spread<2, Words32>(b + 16 + 32 * n, codes + 128 * n);
      return;
    case BlockType::kQ3K:
      chunk.halves[0] = half_at(b + 108);
      for (int j = 0; j < 16; ++j) {
        const int low = j < 8 ? b[96 + j] & 15 : b[88 + j] >> 4, high = b[104 + j % 4] >> j / 4 * 2 & 3;
        chunk.bytes[j] = static_cast<uint8_t>((low | high << 4) - 32);
      }
      for (int n = 0; n < 2; ++n) spread<2, Words32>(b + 32 + 32 * n, codes + 128 * n);
      add_bits<1, 2>(b, codes);
      return;
    case BlockType::kQ4K:
    case BlockType::kQ5K: {
      chunk.halves[0] = half_at(b);
      chunk.halves[1] = half_at(b + 2);
      std::memcpy(chunk.bytes, b + 4, 12);
      const int nibbles = type == BlockType::kQ4K ? 16 : 48;
      for (int n = 0; n < 4; ++n) spread<4, Words32>(b + nibbles + 32 * n, codes + 64 * n);
      if (type == BlockType::kQ5K) add_bits<1, 4>(b + 16, codes);
      return;
    }
    case BlockType::kQ6K:
      chunk.halves[0] = half_at(b + 208);
      std::memcpy(chunk.bytes, b + 192, 16);
      for (int n = 0; n < 2; ++n) {
        spread<4, Words32, 64>(b + 64 * n, codes + 128 * n);
        add_bits<2, 4>(b + 128 + 32 * n, codes + 128 * n);
      }
      return;
    case BlockType::kIq4Xs:
      chunk.halves[0] = half_at(b);
      for (int j = 0; j < 8; ++j) {
        const int low = b[4 + j / 2] >> j % 2 * 4 & 15, high = b[2 + j / 4] >> j % 4 * 2 & 3;
        chunk.bytes[j] = static_cast<uint8_t>((low | high << 4) - 32);
      }
      for (int n = 0; n < 8; ++n) spread<4, Words16>(b + 8 + 16 * n, codes + 32 * n);
      return;
    case BlockType::kNvfp4:
    case BlockType::kGrid:
    case BlockType::kE4m3:
    case BlockType::kTable4:
    case BlockType::kMxfp4Rows: return;
  }
}

constexpr int block_inputs(BlockType type) {
  switch (type) {
    case BlockType::kQ2K:
    case BlockType::kQ3K:
    case BlockType::kQ4K:
    case BlockType::kQ5K:
    case BlockType::kQ6K:
    case BlockType::kIq4Xs: return 256;
    default: return 32;
  }
}

constexpr int block_bytes(BlockType type) {
  switch (type) {
    case BlockType::kQ4_0:
    case BlockType::kIq4Nl: return 18;
    case BlockType::kQ4_1: return 20;
    case BlockType::kQ5_0: return 22;
    case BlockType::kQ5_1: return 24;
    case BlockType::kQ8_0: return 34;
    case BlockType::kMxfp4: return 17;
    case BlockType::kQ2K: return 84;
    case BlockType::kQ3K: return 110;
    case BlockType::kQ4K: return 144;
    case BlockType::kQ5K: return 176;
    case BlockType::kQ6K: return 210;
    case BlockType::kIq4Xs: return 136;
    case BlockType::kNvfp4:
    case BlockType::kGrid:
    case BlockType::kE4m3:
    case BlockType::kTable4:
    case BlockType::kMxfp4Rows: return 0;
  }
  return 0;
}

// Reads consecutive codes of `bits` bits, the first in the lowest bits. The bits of `flip` are inverted in each code.
void read_codes(const uint8_t* bytes, int bits, int count, uint8_t flip, uint8_t* codes) {
  uint8_t padded[kChunkInputs + 4] = {};
  std::memcpy(padded, bytes, (size_t(count) * bits + 7) / 8);
  const int whole = round_up_to(count, 8);
  const int mask = (1 << bits) - 1;
  for (int i = 0; i < whole; ++i) {
    const int bit = i * bits, two = padded[bit / 8] | padded[bit / 8 + 1] << 8;
    codes[i] = static_cast<uint8_t>((two >> bit % 8 & mask) ^ flip);
  }
  std::memset(codes + count, 0, round_up_to(count, kRowGroup) - count);
}

// A grid's scales, in the type that the file has.
struct Scales {
  const char* at;
  DType type;

  float number(int i) const {
    switch (type) {
      case DType::kFloat32: {
        float value;
        std::memcpy(&value, at + i * sizeof value, sizeof value);
        return value;
      }
      case DType::kBFloat16: return to_float(bf16{half(i).bits});
      case DType::kFloat16: return to_float(half(i));
    }
    return 0;
  }
  f16 half(int i) const {
    f16 bits;
    std::memcpy(&bits, at + i * sizeof bits, sizeof bits);
    return bits;
  }
};

Scales scales_of(const PackBlocksArgs& args, int row) {
  const ptrdiff_t bytes = args.scale_stride * dtype_bytes(args.scale_type);
  return {static_cast<const char*>(args.scales) + (row - args.row_begin) * bytes, args.scale_type};
}

// Reads 4-bit codes with a one-byte scale for each group.
void read_fours(const PackBlocksArgs& args, int group, int row, int begin, int count, Chunk& chunk) {
  const int index = row - args.row_begin, scales = (count + group - 1) / group;
  read_codes(static_cast<const uint8_t*>(args.blocks) + index * args.row_bytes + begin / 2, 4, count, 0, chunk.codes);
  std::memset(chunk.bytes, 0, sizeof chunk.bytes);
  std::memcpy(chunk.bytes, static_cast<const uint8_t*>(args.scales) + index * args.scale_stride + begin / group, scales);
  if (args.divisors) chunk.words[0] = args.divisors[index];
}

// Reads a chunk of a row, from input `begin` on.
void read_chunk(const WeightFormat& format, const PackBlocksArgs& args, int row, int begin, Chunk& chunk) {
  const auto* data = static_cast<const uint8_t*>(args.blocks) + (row - args.row_begin) * args.row_bytes;
  const int count = args.cols - begin < kChunkInputs ? args.cols - begin : kChunkInputs, groups = row_groups(count);
  if (const int group = byte_scale_group(args.source)) return read_fours(args, group, row, begin, count, chunk);
  if (args.source != BlockType::kGrid) {
    const size_t blocks = begin / block_inputs(args.source);
    return read_blocks(args.source, data + blocks * block_bytes(args.source), groups, chunk);
  }
  const int bits = args.bits;
  const auto flip = static_cast<uint8_t>(args.twos_complement ? 1 << (bits - 1) : 0);
  read_codes(data + size_t(begin) * bits / 8, bits, count, flip, chunk.codes);
  if (format.kind == WeightKind::kInt8Channel) return;
  const Scales scales = scales_of(args, row);
  const int first = begin / format.group, number = grid_scales(format, groups);
  for (int i = 0; i < number; ++i) {
    if (args.scale_type == DType::kFloat32) {
      chunk.words[i] = scales.number(first + i);
    } else {
      chunk.halves[i] = scales.half(first + i);
    }
    if (args.zeros) chunk.bytes[i] = args.zeros[(row - args.row_begin) * args.zero_stride + first + i];
  }
}

// A chunk's codes of rows side by side: units of inputs that are consecutive in a row, each unit of all rows.
template <typename Unit>
struct Units {
  static constexpr int kOfGroup = kRowGroup / sizeof(Unit);
  Unit at[kChunkGroups * kOfGroup][kLanes] = {};

  // Takes the codes of `count` rows, rounded up to four. All of a chunk together, because a processor waits if it reads
  // a whole vector soon after it has written its parts.
  void take(const Chunk* chunks, int count, int groups) {
    const int units = groups * kOfGroup;
    if constexpr (sizeof(Unit) == 4) {
      for (int r = 0; r < count; r += 4) {
        for (int u = 0; u < units; u += 4) transpose_four(chunks[r].codes + u * 4, sizeof(Chunk), &at[u][r], sizeof at[u]);
      }
    } else {
      for (int r = 0; r < count; ++r) {
        for (int u = 0; u < units; ++u) std::memcpy(&at[u][r], chunks[r].codes + u * sizeof(Unit), sizeof(Unit));
      }
    }
  }
};

// Writes what `unit` gives for each lane.
template <typename Unit, typename Body>
TW_INLINE void put_units(const Lanes& lanes, char* to, Body&& unit) {
  Unit units[kLanes];
  for (int i = 0; i < kLanes; ++i) units[i] = unit(i);
  lanes.put(to, units);
}

// Writes a chunk's header and its codes in planes.
void put_chunk(const WeightFormat& format, const BlockTraits& traits, const Chunk* chunks, Units<uint32_t>& units,
               int groups, const Lanes& lanes, char* to) {
  const ChunkHeader header = ChunkHeader::of(format, groups);
  for (int r = 0; r < lanes.count; ++r) {
    const auto put_fields = [&](size_t at, const auto* from, int count) {
      char* place = to + at + (lanes.first.lane + r) * sizeof *from;
      for (int i = 0; i < count; ++i) std::memcpy(place + size_t(i) * kLanes * sizeof *from, from + i, sizeof *from);
    };
    put_fields(0, chunks[r].halves, header.halves);
    put_fields(ChunkHeader::words_at(header.halves), chunks[r].words, header.words);
    put_fields(ChunkHeader::bytes_at(header.halves, header.words), chunks[r].bytes, header.bytes);
  }
  to += header.size();
  const auto put = [&](auto&& four_codes) {
    put_units<uint32_t>(lanes, to, four_codes);
    to += kVectorBytes;
  };
  const int low_bits = traits.four ? 4 : 2;
  units.take(chunks, lanes.count, groups);
  for (int g = 0; g < groups; ++g) {
    const auto* quads = units.at + g * kGroupQuads;
    if (traits.whole) {
      for (int q = 0; q < kGroupQuads; ++q) put([&](int i) { return quads[q][i]; });
    }
    if (traits.four) {
      for (int q = 0; q < kGroupQuads; q += 2) {
        put([&](int i) { return (quads[q][i] & 0x0f0f0f0fu) | (quads[q + 1][i] & 0x0f0f0f0fu) << 4; });
      }
    }
    if (traits.two) {
      const int shift = traits.four ? 4 : 0;
      for (int q = 0; q < kGroupQuads; q += 4) {
        put([&](int i) {
          uint32_t all = 0;
          for (int j = 0; j < 4; ++j) all |= (quads[q + j][i] >> shift & 0x03030303u) << 2 * j;
          return all;
        });
      }
    }
    if (traits.one) {
      put([&](int i) {
        uint32_t all = 0;
        for (int q = 0; q < kGroupQuads; ++q) all |= (quads[q][i] >> low_bits & 0x01010101u) << q;
        return all;
      });
    }
  }
}

// The number whose bytes are a unit of kInt8 and kInt4.
template <int BYTES>
struct UnitNumber {
  using Type = uint32_t;
};
template <>
struct UnitNumber<8> {
  using Type = uint64_t;
};

using IntegerUnit = UnitNumber<kIntegerUnit>::Type;

// Writes codes and scales of `count` inputs, from `begin` on, in the layout of kInt8, kInt8Channel or kInt4.
void put_integers(const WeightFormat& format, const GroupLayout& layout, const Chunk* chunks, Units<IntegerUnit>& units,
                  int begin, int count, const Lanes& lanes) {
  constexpr IntegerUnit kFlip = static_cast<IntegerUnit>(~IntegerUnit{0}) / 255 * kInt8Flip;
  constexpr int kUnits = Units<IntegerUnit>::kOfGroup;
  const bool channel = format.kind == WeightKind::kInt8Channel, nibbles = format.kind == WeightKind::kInt4;
  char* strip = lanes.first.strip;
  units.take(chunks, lanes.count, row_groups(count));
  for (int i = 0; i < count; i += kRowGroup) {
    const int group = (begin + i) / format.group, in_group = (begin + i) % format.group;
    if (!channel && in_group == 0) {
      char* scales = strip + layout.scale_at(group) + lanes.first.lane * sizeof(f16);
      const int place = i / format.group, shifts = row_groups(count);
      for (int r = 0; r < lanes.count; ++r, scales += sizeof(f16)) {
        std::memcpy(scales, &chunks[r].halves[place], sizeof(f16));
        if (format.zero_points) std::memcpy(scales + layout.shift_bytes, &chunks[r].halves[shifts + place], sizeof(f16));
      }
    }
    const auto* of_group = units.at + i / kIntegerUnit;
    if (nibbles) {
      char* to = strip + layout.values_at(group) + size_t(in_group) / 2 * kLanes;
      for (int u = 0; u < kUnits; u += 2, to += sizeof of_group[u]) {
        put_units<IntegerUnit>(lanes, to, [&](int lane) { return of_group[u][lane] | of_group[u + 1][lane] << 4; });
      }
    } else {
      char* to = strip + (channel ? size_t(begin + i) * kLanes : layout.values_at(group) + size_t(in_group) * kLanes);
      for (int u = 0; u < kUnits; ++u, to += sizeof of_group[u]) {
        put_units<IntegerUnit>(lanes, to, [&](int lane) { return of_group[u][lane] ^ kFlip; });
      }
    }
  }
}

void put_channel_scales(const PackBlocksArgs& args, int row, const Lanes& lanes) {
  float scales[kLanes] = {};
  for (int r = 0; r < lanes.count; ++r) scales[r] = scales_of(args, row + r).number(0);
  lanes.put(lanes.first.strip + size_t(channel_inputs(args.k)) * kLanes, scales);
}

}  // namespace

void pack_blocks(const WeightFormat& format, const PackBlocksArgs& args) {
  if (args.source == BlockType::kE4m3 || args.source == BlockType::kTable4) return pack_widened(format, args);
  const bool planes = is_blocks(format.kind), channel = format.kind == WeightKind::kInt8Channel;
  const BlockTraits traits = planes ? traits_of(format) : BlockTraits{};
  const GroupLayout layout = planes ? GroupLayout{} : GroupLayout::of(format, args.k);
  Chunk chunks[kLanes] = {};
  Units<uint32_t> quads;
  Units<IntegerUnit> units;
  // Rows that become neighbours in a strip are packed together, so that its vectors are written whole.
  for (int row = args.row_begin; row < args.row_end;) {
    const Lanes lanes{find_column(format, args.weight, args.k, packed_column(args, row)), run_length(args, row, kLanes)};
    char* to = lanes.first.strip;
    for (int begin = 0; begin < args.cols; begin += kChunkInputs) {
      const int count = args.cols - begin < kChunkInputs ? args.cols - begin : kChunkInputs, groups = row_groups(count);
      for (int r = 0; r < lanes.count; ++r) read_chunk(format, args, row + r, begin, chunks[r]);
      if (planes) {
        put_chunk(format, traits, chunks, quads, groups, lanes, to);
        to += chunk_bytes(format, groups);
      } else {
        put_integers(format, layout, chunks, units, begin, count, lanes);
      }
    }
    if (channel) put_channel_scales(args, row, lanes);
    row += lanes.count;
  }
}

void unpack_blocks_row(const WeightFormat& format, const void* weight, int k, int row, float* out) {
  const int lane = row % kLanes;
  const char* chunk = static_cast<const char*>(weight) + size_t(row / kLanes) * block_strip_bytes(format, k);
  const BlockTraits traits = traits_of(format);
  Expanded expanded;
  for (int begin = 0; begin < k; begin += kChunkInputs) {
    const int count = k - begin < kChunkInputs ? k - begin : kChunkInputs, groups = row_groups(count);
    expand_chunk(format, chunk, groups, expanded);
    const ChunkHeader header = ChunkHeader::of(format, groups);
    const char* zeros = chunk + ChunkHeader::bytes_at(header.halves, header.words);
    for (int i = 0; i < count; ++i) {
      const int part = i / (traits.halves ? kRowGroup / 2 : kRowGroup);
      const int code = code_at(traits, expanded, lane, i);
      const float scale = expanded.scales[part][lane];
      if (format.kind == WeightKind::kGrid && format.zero_points) {
        // Subtract first: with a float32 scale, the product with either number would not be exact.
        const int zero = static_cast<uint8_t>(zeros[(format.group < kChunkInputs ? i / format.group : 0) * kLanes + lane]);
        const int centre = format.bits == 8 && !kUnsignedBytes ? 128 : 0;
        out[begin + i] = scale * static_cast<float>(code + centre - zero);
      } else {
        out[begin + i] = scale * static_cast<float>(code);
        if (traits.shifts) out[begin + i] += expanded.shifts[part][lane];
      }
    }
    chunk += chunk_bytes(format, groups);
  }
}

}  // namespace tidewheel::TW_ISA
