// The block types of quantized files, by name, and how each is stored.
#pragma once

#include <optional>
#include <string_view>

#include "kernels/kernels.h"

namespace tidewheel {

struct BlockTypeInfo {
  std::string_view name;
  BlockType type;
  int inputs, bytes;  // of a block; 0 if the type has no blocks
  WeightFormat format;
};

// Formats of grids and small floats depend on their parameters: see `grid_format` and `small_float_format`.
constexpr BlockTypeInfo kBlockTypes[] = {
    {"q4_0", BlockType::kQ4_0, 32, 18, {WeightKind::kInt4, 32}},
    {"q4_1", BlockType::kQ4_1, 32, 20, {WeightKind::kInt4, 32, true}},
    {"q5_0", BlockType::kQ5_0, 32, 22, {WeightKind::kQ5_0}},
    {"q5_1", BlockType::kQ5_1, 32, 24, {WeightKind::kQ5_1}},
    {"q8_0", BlockType::kQ8_0, 32, 34, {WeightKind::kInt8}},
    {"q2_k", BlockType::kQ2K, 256, 84, {WeightKind::kQ2K}},
    {"q3_k", BlockType::kQ3K, 256, 110, {WeightKind::kQ3K}},
    {"q4_k", BlockType::kQ4K, 256, 144, {WeightKind::kQ4K}},
    {"q5_k", BlockType::kQ5K, 256, 176, {WeightKind::kQ5K}},
    {"q6_k", BlockType::kQ6K, 256, 210, {WeightKind::kQ6K}},
    {"iq4_nl", BlockType::kIq4Nl, 32, 18, {WeightKind::kIq4Nl}},
    {"iq4_xs", BlockType::kIq4Xs, 256, 136, {WeightKind::kIq4Xs}},
    {"mxfp4", BlockType::kMxfp4, 32, 17, {WeightKind::kMxfp4}},
    {"nvfp4", BlockType::kNvfp4, 0, 0, {WeightKind::kNvfp4}},
    {"mxfp4-rows", BlockType::kMxfp4Rows, 0, 0, {WeightKind::kMxfp4}},
    {"e4m3", BlockType::kE4m3, 0, 0, {WeightKind::kE4m3}},
    {"table4", BlockType::kTable4, 0, 0, {WeightKind::kTable4}},
};

// Finds a type by its lower-case name in the file; null if there is none.
constexpr const BlockTypeInfo* find_block_type(std::string_view name) {
  for (const BlockTypeInfo& info : kBlockTypes) {
    if (info.name == name) return &info;
  }
  return nullptr;
}

constexpr const BlockTypeInfo& block_type_info(BlockType type) {
  for (const BlockTypeInfo& info : kBlockTypes) {
    if (info.type == type) return info;
  }
  return kBlockTypes[0];
}

// How many inputs share a one-byte scale, for 4-bit codes that have such scales; 0 for other codes.
constexpr int byte_scale_group(BlockType type) {
  return type == BlockType::kNvfp4 ? 16 : type == BlockType::kMxfp4Rows ? 32 : 0;
}

constexpr bool is_small_floats(BlockType type) { return type == BlockType::kE4m3 || type == BlockType::kTable4; }

// The format that keeps small floats: e4m3, or 4 bits that index a `table` of 16 numbers. Empty if there is none:
// groups must be 32, 64 or a multiple of 128. If a whole row is one group, it counts as the next such multiple.
inline std::optional<WeightFormat> small_float_format(BlockType type, int group, const float* table) {
  if (group != 32 && group != 64 && (group <= 0 || group % 128 != 0)) return {};
  if (type == BlockType::kE4m3) return WeightFormat{WeightKind::kE4m3, group};
  WeightFormat format{WeightKind::kTable4, group};
  for (int i = 0; i < 16; ++i) format.table[i] = table[i];
  return format;
}

// The format that keeps a grid's bits: integers of `bits` bits with a scale for every `group` inputs. Empty if there is
// none: bits must be 2, 3, 4 or 8, and groups 32, 64, 128 or a multiple of 256. If a whole row is one group, it counts
// as the next such multiple.
constexpr std::optional<WeightFormat> grid_format(int bits, int group, bool zero_points, DType scale_type) {
  if (bits != 2 && bits != 3 && bits != 4 && bits != 8) return {};
  const bool small = group == 32 || group == 64 || group == 128;
  if (!small && (group <= 0 || group % 256 != 0)) return {};
  const bool halves = !zero_points && scale_type == DType::kFloat16;
  if (bits == 4 && small && halves) return WeightFormat{WeightKind::kInt4, group};
  if (bits == 8 && group == 32 && halves) return WeightFormat{WeightKind::kInt8};
  return WeightFormat{WeightKind::kGrid, group, zero_points, bits, scale_type};
}

}  // namespace tidewheel
