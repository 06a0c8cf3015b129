// Rows of quantized files with random bits, and what each number means: the definitions, element by element.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/block_formats.h"

namespace tidewheel::test {

inline float half_at(const uint8_t* p) { return to_float(f16{static_cast<uint16_t>(p[0] | p[1] << 8)}); }

constexpr int kNonlinear[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int kTwiceE2m1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The low or high half of a byte, of which the first 16 elements of 32 take the low ones.
inline int nibble(const uint8_t* bytes, int i) { return bytes[i % 16] >> i / 16 * 4 & 15; }

// Scale and minimum of a sub-block of Q4_K and Q5_K.
inline std::pair<int, int> scale_and_minimum(const uint8_t* s, int j) {
  if (j < 4) return {s[j] & 63, s[j + 4] & 63};
  return {(s[j + 4] & 15) | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4};
}

// Element i of a GGUF block.
inline float block_element(BlockType type, const uint8_t* b, int i) {
  switch (type) {
    case BlockType::kQ4_0: return half_at(b) * static_cast<float>(nibble(b + 2, i) - 8);
    case BlockType::kQ4_1: return half_at(b) * static_cast<float>(nibble(b + 4, i)) + half_at(b + 2);
    case BlockType::kQ5_0:
      return half_at(b) * static_cast<float>((nibble(b + 6, i) | (b[2 + i / 8] >> i % 8 & 1) << 4) - 16);
    case BlockType::kQ5_1:
      return half_at(b) * static_cast<float>(nibble(b + 8, i) | (b[4 + i / 8] >> i % 8 & 1) << 4) + half_at(b + 2);
    case BlockType::kQ8_0: return half_at(b) * static_cast<float>(static_cast<int8_t>(b[2 + i]));
    case BlockType::kQ2K: {
      const int q = b[16 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3, s = b[i / 16];
      return half_at(b + 80) * static_cast<float>(s & 15) * static_cast<float>(q) - half_at(b + 82) * static_cast<float>(s >> 4);
    }
    case BlockType::kQ3K: {
      const int j = i / 16, low = b[32 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3, high = b[i % 32] >> i / 32 & 1;
      const int scale = (b[96 + j % 8] >> j / 8 * 4 & 15) | (b[104 + j % 4] >> j / 4 * 2 & 3) << 4;
      return half_at(b + 108) * static_cast<float>(scale - 32) * static_cast<float>((low | high << 2) - 4);
    }
    case BlockType::kQ4K: {
      const auto [scale, minimum] = scale_and_minimum(b + 4, i / 32);
      const int q = b[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
      return half_at(b) * static_cast<float>(scale) * static_cast<float>(q) - half_at(b + 2) * static_cast<float>(minimum);
    }
    case BlockType::kQ5K: {
      const auto [scale, minimum] = scale_and_minimum(b + 4, i / 32);
      const int q = (b[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) | (b[16 + i % 32] >> i / 32 & 1) << 4;
      return half_at(b) * static_cast<float>(scale) * static_cast<float>(q) - half_at(b + 2) * static_cast<float>(minimum);
    }
    case BlockType::kQ6K: {
      const int low = b[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15;
      const int high = b[128 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
      const auto scale = static_cast<float>(static_cast<int8_t>(b[192 + i / 16]));
      return half_at(b + 208) * scale * static_cast<float>((low | high << 4) - 32);
    }
    case BlockType::kIq4Nl: return half_at(b) * static_cast<float>(kNonlinear[nibble(b + 2, i)]);
    case BlockType::kIq4Xs: {
      const int j = i / 32, scale = (b[4 + j / 2] >> j % 2 * 4 & 15) | (b[2 + j / 4] >> j % 4 * 2 & 3) << 4;
      return half_at(b) * static_cast<float>(scale - 32) * static_cast<float>(kNonlinear[nibble(b + 8 + 16 * j, i % 32)]);
    }
    case BlockType::kMxfp4: return std::ldexp(static_cast<float>(kTwiceE2m1[nibble(b + 1, i)]), b[0] - 128);
    case BlockType::kNvfp4:
    case BlockType::kGrid:
    case BlockType::kE4m3:
    case BlockType::kTable4:
    case BlockType::kMxfp4Rows: break;
  }
  return 0;
}

// Where a block's float16 numbers lie, which random bits would make infinite.
inline std::vector<int> halves_of(BlockType type) {
  switch (type) {
    case BlockType::kQ4_1:
    case BlockType::kQ5_1:
    case BlockType::kQ4K:
    case BlockType::kQ5K: return {0, 2};
    case BlockType::kQ2K: return {80, 82};
    case BlockType::kQ3K: return {108};
    case BlockType::kQ6K: return {208};
    case BlockType::kMxfp4: return {};
    default: return {0};
  }
}

// A quantized matrix [rows, cols] as a file has it.
struct QuantizedMatrix {
  WeightFormat format;
  BlockType type;
  int rows, cols;
  size_t row_bytes;
  std::vector<uint8_t> blocks;
  // Of grids.
  int bits = 0, group = 0;
  DType scale_type = DType::kFloat32;
  std::vector<char> scales = {};
  std::vector<uint8_t> zeros = {};
  std::vector<float> divisors = {};  // of kNvfp4
  std::vector<float> largest = {}, offsets = {};  // of kTable4 whose scales are codes
  bool twos_complement = false;
  std::vector<float> values = {};  // [rows, cols]: what the definition says

  int scale_groups() const { return (cols + group - 1) / group; }
};

inline QuantizedMatrix random_blocks(const BlockTypeInfo& info, int rows, int cols) {
  const int blocks = cols / info.inputs;
  QuantizedMatrix matrix{info.format, info.type, rows, cols, size_t(blocks) * info.bytes, {}};
  std::mt19937 random(5 + static_cast<int>(info.type));
  matrix.blocks.resize(rows * matrix.row_bytes);
  for (uint8_t& byte : matrix.blocks) byte = static_cast<uint8_t>(random());
  for (size_t at = 0; at < matrix.blocks.size(); at += info.bytes) {
    uint8_t* block = matrix.blocks.data() + at;
    for (const int place : halves_of(info.type)) {
      const f16 half = to_f16(static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 1e-5f);
      block[place] = static_cast<uint8_t>(half.bits);
      block[place + 1] = static_cast<uint8_t>(half.bits >> 8);
    }
    if (info.type == BlockType::kMxfp4) block[0] = static_cast<uint8_t>(100 + block[0] % 20);
    for (int i = 0; i < info.inputs; ++i) matrix.values.push_back(block_element(info.type, block, i));
  }
  return matrix;
}

// `group` 0: one for a whole row.
inline QuantizedMatrix random_grid(const WeightFormat& format, int bits, int group, DType scale_type, bool twos_complement,
                                   int rows, int cols) {
  QuantizedMatrix m{format, BlockType::kGrid, rows, cols, (size_t(cols) * bits + 7) / 8, {}};
  m.bits = bits;
  m.group = group ? group : cols;
  m.scale_type = scale_type;
  m.twos_complement = twos_complement;
  m.blocks.resize(rows * m.row_bytes);
  std::mt19937 random(100 * bits + group);
  const int scale_bytes = dtype_bytes(scale_type), groups = m.scale_groups();
  std::vector<float> scales;
  for (int i = 0; i < rows * groups; ++i) {
    const float number = 0.001f * static_cast<float>(1 + random() % 1000);
    const bf16 brain = to_bf16(number);
    const f16 half = to_f16(number);
    const bool is_float = scale_type == DType::kFloat32, is_half = scale_type == DType::kFloat16;
    const char* bytes = is_float ? reinterpret_cast<const char*>(&number)
                                 : is_half ? reinterpret_cast<const char*>(&half) : reinterpret_cast<const char*>(&brain);
    m.scales.insert(m.scales.end(), bytes, bytes + scale_bytes);
    scales.push_back(is_float ? number : is_half ? to_float(half) : to_float(brain));
    if (format.zero_points) m.zeros.push_back(static_cast<uint8_t>(random() % (1 << bits)));
  }
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < cols; ++i) {
      const int code = static_cast<int>(random() % (1u << bits)), place = r * groups + i / m.group;
      for (int bit = 0; bit < bits; ++bit) {
        const int at = i * bits + bit;
        m.blocks[r * m.row_bytes + at / 8] |= static_cast<uint8_t>((code >> bit & 1) << at % 8);
      }
      const int half = 1 << (bits - 1), value = twos_complement ? (code ^ half) - half : code;
      const int zero = format.zero_points ? m.zeros[place] : twos_complement ? 0 : half;
      m.values.push_back(scales[place] * static_cast<float>(value - zero));
    }
  }
  return m;
}

// By the format's definition; code 127 and its negative are no numbers.
inline float e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 8, exponent - 7)
                                   : std::ldexp(static_cast<float>(mantissa), -9);
  return code & 128 ? -magnitude : magnitude;
}

// Numbers for codes of scales.
inline const float* scale_table() {
  static const std::vector<float> table = [] {
    std::vector<float> numbers;
    for (int i = 0; i < 256; ++i) numbers.push_back(static_cast<float>(i * i % 251 - 100) / 128);
    return numbers;
  }();
  return table.data();
}

// Small floats. `group` 0: one scale for a whole row. With a `scale_run`, scales are codes.
inline QuantizedMatrix random_small_floats(BlockType type, int group, int rows, int cols, int scale_run = 0) {
  std::mt19937 random(17 + group);
  float table[16];
  for (float& number : table) number = 0.001f * static_cast<float>(static_cast<int>(random() % 2001) - 1000);
  const bool is_nvfp4 = type == BlockType::kNvfp4, bytes = type == BlockType::kE4m3, table_of = type == BlockType::kTable4;
  const int stored = group ? group : (cols + 127) / 128 * 128;
  WeightFormat format = byte_scale_group(type) ? block_type_info(type).format : *small_float_format(type, stored, table);
  if (scale_run) format.scale_table = scale_table(), format.scale_run = scale_run;
  QuantizedMatrix m{format, type, rows, cols, bytes ? size_t(cols) : size_t(cols + 1) / 2, {}};
  m.group = group ? group : cols;
  m.blocks.resize(rows * m.row_bytes);
  const int groups = m.scale_groups();
  std::vector<float> scales;
  for (int r = 0; r < rows; ++r) {
    if (is_nvfp4) m.divisors.push_back(0.5f + static_cast<float>(random() % 1000));
    if (scale_run) m.offsets.push_back(0.001f * static_cast<float>(random() % 1000));
    for (int g = 0; g < groups; ++g) {
      if (scale_run) {
        if (g % scale_run == 0) m.largest.push_back(0.01f * static_cast<float>(random() % 100));
        const int code = static_cast<int>(random() % 256);
        m.scales.push_back(static_cast<char>(code));
        const volatile float product = scale_table()[code] * m.largest.back();
        scales.push_back(product + m.offsets.back());
        continue;
      }
      const float number = 0.001f * static_cast<float>(1 + random() % 1000);
      const auto code = static_cast<uint8_t>(is_nvfp4 ? random() % 127 : 100 + random() % 40);
      const bool byte = byte_scale_group(type) != 0;
      const char* of = byte ? reinterpret_cast<const char*>(&code) : reinterpret_cast<const char*>(&number);
      m.scales.insert(m.scales.end(), of, of + (byte ? 1 : sizeof number));
      scales.push_back(is_nvfp4 ? e4m3_value(code) / m.divisors.back() : byte ? std::ldexp(1.0f, code - 127) : number);
    }
  }
  for (int r = 0; r < rows; ++r) {
    uint8_t* row = m.blocks.data() + r * m.row_bytes;
    for (int i = 0; i < cols; ++i) {
      int code = static_cast<int>(random() % (bytes ? 256 : 16));
      if (bytes && (code & 127) == 127) code = 1;
      const bool high = table_of ? i % 2 == 0 : i % 2;
      row[bytes ? i : i / 2] |= static_cast<uint8_t>(bytes || !high ? code : code << 4);
      const float number = bytes ? e4m3_value(code) : table_of ? table[code] : 0.5f * static_cast<float>(kTwiceE2m1[code]);
      m.values.push_back(scales[r * groups + i / m.group] * number);
    }
  }
  return m;
}

}  // namespace tidewheel::test
