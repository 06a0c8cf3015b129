// The table of kernels that every ISA level fills, and the arguments they take. Plain pointers and numbers only.
//
// Rows are tokens. Between kernels they are float32; GEMM rounds or quantizes its inputs to what its weights want, row
// by row, so that a row never depends on another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace tidewheel {

// Columns of a packed weight are shared out, and finished, in panels of this many.
constexpr int kPanel = 32;
// Inputs of a group, whose products are added up in integers.
constexpr int kRowGroup = 32;
// Inputs of a chunk: what is expanded at a time of weights that keep the bits of a quantized file.
constexpr int kChunkInputs = 256, kChunkGroups = kChunkInputs / kRowGroup;

// How a weight is stored. Quantized ones meet activations quantized to int8, with a scale for every 32 inputs of a row: an
// activation that stands out costs those beside it their precision, and real models have many.
// kInt8: a float16 scale for every 32 inputs of a column.
// kInt8Channel: a float32 scale a column, and one a row.
// kInt4: 4 bits an input, a float16 scale for every `group` inputs of a column, w = scale * (q - 8), or with zero
// points also a float16 shift, w = scale * q + shift.
//
// The kinds from kQ5_0 on keep the bits of a quantized file; their numbers are what the file means, exactly. GGUF's types
// are known by their names, https://github.com/ggml-org/ggml. (Q8_0 is kInt8, Q4_0 is kInt4, and Q4_1 kInt4 with zero
// points, all with groups of 32.) kNvfp4: 4 bits (e2m1), an e4m3 scale for every 16 inputs, and a float32 divisor of the
// scales for a column.
// kGrid: `bits` an input, for every `group` inputs a scale of `scale_type`, w = scale * (q - zero), where `zero` is a
// byte with zero points, else 2^(bits - 1).
//
// The kinds behind kGrid keep the bits of floats that are no multiples of a scale. They have a float32 scale for every
// `group` inputs of a column, and meet activations in floats. kE4m3: 8 bits, which become bfloat16; rows as for
// kBFloat16. kTable4: 4 bits, each a number of `table`; rows as for kFloat32. With a `scale_table` of 256 numbers
// scales are quantized too: a group's is scale_table[code] * largest + offset, where `scale_run` groups share
// `largest`, and a column `offset`.
enum class WeightKind : int {
  kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt8Channel = 4, kInt4 = 5,
  kQ5_0, kQ5_1, kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kIq4Nl, kIq4Xs, kMxfp4, kNvfp4, kGrid,
  kE4m3, kTable4,
};

struct WeightFormat {
  WeightKind kind = WeightKind::kFloat32;
  // kInt4: 32, 64 or 128; kGrid: those, or any multiple of 256; kE4m3 and kTable4: 32, 64 or any multiple of 128. A
  // whole row is the next multiple.
  int group = kRowGroup;
  bool zero_points = false;  // kInt4, kGrid
  int bits = 0;              // kGrid: 2, 3, 4 or 8
  DType scale_type = DType::kFloat32;  // kGrid
  float table[16] = {};  // kTable4
  const float* scale_table = nullptr;  // kTable4: [256]; equal tables are equal pointers
  int scale_run = 0;

  bool operator==(const WeightFormat&) const = default;
};

// What a quantized file has: blocks of GGUF, or fields of their own. kMxfp4Rows are codes and scales as of kNvfp4,
// which become kMxfp4.
enum class BlockType : int {
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kIq4Nl, kIq4Xs, kMxfp4, kNvfp4, kGrid, kE4m3, kTable4,
  kMxfp4Rows,
};

// Of what packed weights look like and hold. Raise it with every change of layout, of their order, of the checksum, or
// of the numbers that quantization chooses: weights that were packed and kept under another version are not used.
constexpr int kPackedVersion = 6;

// KV blocks of 16 tokens. A block holds for each KV head K, then V, then for int8 16 scales of K and 16 of V. Heads
// whose V is a part of K have no V of its own there, and no scales of it. float32 and float16: K [dim][16], V
// [16][values]; the others: K [dim/2][16][2], V [16/2][values][2]. Levels with kDotsBytes have int8 in fours: K
// [dim/4][16][4], V [16/4][values][4]. int4: K [dim/2][16] bytes, V [groups of values][16][16] bytes, of which each has
// elements i and i + 16 of the group, and scales [groups of K][16] and [groups of V][16]. Heads whose V is a part of K
// cannot be in int4.
constexpr int kBlockTokens = 16;
// Attention is computed in KV splits, tile after tile within a split; both start at multiples of their
// size in tokens, whoever else is in the batch. Each split is a softmax of its own, and a row's splits are folded in
// ascending order: who computed them, and when, cannot show in the result.
constexpr int kAttentionTile = 128;
constexpr int kKvSplit = 512;
constexpr int kAttentionRows = 96;  // query rows (tokens x heads of a group) of one attention task, at most

// kGeluQuick: x * sigmoid(1.702 x), kRelu2: relu(x)^2
enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4, kGeluQuick = 5 };

enum class Epilogue : int {
  kStore,       // y = x W^T + bias
  kAdd,         // y += x W^T + bias
  kActivation,  // y = act(x W^T + bias)
  kGated,       // panels hold 16 gate then 16 up columns: y = act(gate) * up
};
constexpr int kGateColumns = kPanel / 2;  // of a panel, for kGated

// Matrices of adapters are packed in LoRA panels of this many outputs, [inputs / step, kLoraPanel, step].
constexpr int kLoraPanel = 16;

// A LoRA panel has zeros up to a multiple of this many inputs, and is multiplied as far as that. Each
// `lora_panel_step` inputs are side by side.
constexpr int kLoraPanelInputs = 4;
constexpr int lora_panel_step(DType type) { return type == DType::kBFloat16 ? 2 : 1; }
constexpr size_t lora_panel_bytes(int inputs, DType type) {
  return size_t(inputs + kLoraPanelInputs - 1) / kLoraPanelInputs * kLoraPanelInputs * kLoraPanel * dtype_bytes(type);
}

// What an adapter adds to some columns of a product: y += h B, with the values of h from `first` on.
struct LoraPanel {
  const void* b = nullptr;
  int first = 0, count = 0;

  constexpr size_t bytes(DType type) const { return lora_panel_bytes(count, type); }
};

// What is added to one row of a product.
struct LowRankRow {
  const LoraPanel* lora_panels = nullptr;  // of all packed columns; null: nothing is added
  const void* h = nullptr;                 // what `pack_lora_panel_inputs` made
  DType type = DType::kFloat32;            // of B
  // What is read next of the adapter, some of it with each panel, to be fetched meanwhile.
  const char* next = nullptr;
  size_t next_bytes = 0;  // a panel
};

struct GemmArgs {
  const void* x;           // packed rows, from row 0
  int row_begin, row_end;  // row_begin is a multiple of tile_rows, and row_end too unless it is the number of rows
  const void* weight;  // packed
  int k;
  int n;               // columns of the packed weight, a multiple of kPanel unless kStore or kAdd
  int panel_begin, panel_end;
  const float* bias;   // [n] in packed column order, or null
  Epilogue epilogue;
  Activation activation;
  float* y;            // [rows, n], or [rows, n / 2] for kGated
  size_t y_stride;     // elements
  // What comes of a product and its bias before the epilogue: times `scale`, then softcap * tanh(it / softcap).
  // kGated: the scale is of the gate alone.
  float scale = 1;
  float softcap = 0;   // 0: none
  // kGated: above 0, y = (clip(up) + 1) * g * sigmoid(1.702 g), where g is min(gate, limit) and up is clipped to
  // +-limit.
  float swiglu_limit = 0;
  // Added to products before anything else but the bias: for each row, by an adapter; null: to none.
  const LowRankRow* low_rank = nullptr;
  int low_rank_panel = 0;  // of the LoRA panels, that of this weight's first one
};

// y = x W^T for some rows x and some LoRA panels of W.
struct ProjectArgs {
  const void* const* x;  // [rows], each what `pack_lora_panel_inputs` made
  int rows, inputs;
  const void* w;         // [LoRA panels], one behind the other
  DType type;            // of W
  int lora_panels;
  float* const* y;       // [rows], each [LoRA panels, kLoraPanel]
};

struct PackWeightsArgs {
  const void* source;  // rows row_begin to row_end - 1 of [rows, cols], element strides
  DType source_type;
  ptrdiff_t row_stride, col_stride;
  int rows, cols;
  void* weight;        // packed, zeroed
  int k;
  // Row r of the source becomes packed column (r / group) * group_stride + r % group + offset.
  int group, group_stride, offset;
  int row_begin, row_end;
};

// A quantized file's rows row_begin to row_end - 1, for the format that keeps their bits: see `block_format`. Nothing
// has to be aligned. Rows lie `row_bytes` apart, which is at least what their blocks or codes take.
struct PackBlocksArgs {
  BlockType source;
  const void* blocks;  // GGUF: rows of whole blocks; else codes, the first input in the lowest bits, kTable4: in the highest
  size_t row_bytes;
  // kGrid: scales [rows, groups] of scale_type in this machine's byte order, zero points [rows, groups] or null, and
  // whether codes are in two's complement (those have no zero points). kNvfp4: scales [rows, K / 16] e4m3, and what all
  // of a row are divided by. kMxfp4Rows: [rows, K / 32] exponents of two, with a bias of 127. kE4m3 and kTable4: scales
  // [rows, groups] of float32, or their codes of 8 bits, with `largest` [rows, groups / scale_run] and `offsets`
  // [rows]. They begin at row_begin, too. Strides are in elements.
  int bits;
  const void* scales;
  DType scale_type;
  ptrdiff_t scale_stride;
  const uint8_t* zeros;
  ptrdiff_t zero_stride;
  bool twos_complement;
  const float* divisors;  // kNvfp4: [rows]
  const float* largest;
  ptrdiff_t largest_stride;
  const float* offsets;
  int rows, cols;         // cols: whole blocks for GGUF
  void* weight;        // packed, zeroed
  int k;
  int group, group_stride, offset;  // columns, as in PackWeightsArgs
  int row_begin, row_end;
};

enum class NormKind : int { kNone, kRms, kLayer };

struct Norm {
  NormKind kind = NormKind::kNone;
  float eps = 0;
  float* weight = nullptr;  // null: values are normalized and not scaled
  float* bias = nullptr;    // or null
};

// GEMM inputs. They are packed in tiles of tile_rows rows, the last of what is left, so that a tile is read in order.
struct PackInputsArgs {
  const float* x;
  size_t x_stride;        // elements
  const int32_t* gather;  // row r is x's row gather[r]; or null
  int num_rows, k;
  Norm norm;              // applied on the way
  float* scratch;         // [k + kRowGroup]
  void* out;              // num_rows * row_bytes
};

struct Heads {
  int num_heads, num_kv_heads, head_dim;
  int value_dim = 0;     // of V; 0: head_dim
  int value_start = -1;  // V is not stored: it is K from this element on, an even number; -1: it is
  bool operator==(const Heads&) const = default;
  int padded_dim() const { return (head_dim + 15) / 16 * 16; }
  int values() const { return value_dim ? value_dim : head_dim; }
  int padded_values() const { return (values() + 15) / 16 * 16; }
  bool values_in_keys() const { return value_start >= 0; }
  int stored_values() const { return values_in_keys() ? 0 : padded_values(); }
  int group() const { return num_heads / num_kv_heads; }
  // One KV head's part of a block, and a block.
  size_t head_bytes(CacheType type) const {
    if (type == CacheType::kInt4) {
      const size_t k_groups = cache_groups(padded_dim()), v_groups = cache_groups(stored_values());
      return kBlockTokens * (size_t(padded_dim()) / 2 + v_groups * kCacheGroup / 2 + (k_groups + v_groups) * sizeof(f16));
    }
    const size_t scales = type == CacheType::kInt8 ? (values_in_keys() ? 1 : 2) * sizeof(float) : 0;
    return kBlockTokens * (size_t(padded_dim() + stored_values()) * cache_element_bytes(type) + scales);
  }
  size_t block_bytes(CacheType type) const { return num_kv_heads * head_bytes(type); }
  // Floats that the attention of one KV head over one split results in: sums [rows, padded_values], maximum [rows],
  // total [rows]. A row is a query head of a token.
  size_t partial_floats(int num_tokens) const { return size_t(num_tokens) * group() * (padded_values() + 2); }
};

// One token, some of its KV heads and their query heads: q and k are normalized and rotated, v is normalized, q is
// stored as a query, k and v go to the cache. A v that is a part of k is not looked at.
struct StoreQkvArgs {
  Heads heads;
  int kv_begin, kv_end;
  float* qkv;               // [(heads + kv_heads) * head_dim + kv_heads * values], changed in place
  Norm q_norm, k_norm;      // of each head
  const float* cos;         // [rotary_pairs], or null
  const float* sin;
  int rotary_pairs;
  bool interleaved;         // a pair is 2i and 2i + 1, else i and i + rotary_pairs
  void* q;                  // [heads, padded_dim] queries: `query_bytes` each
  void* cache_heads;        // of the cache: this layer's, this token's block, the heads from kv_begin on; or null: no k, v
  int slot;
  float q_scale = 1;        // of the queries, in the end
  int norm_stride = 0;      // from one head's weights of a norm to the next one's; 0: all have the same
  bool norm_after_rope = false;
  Norm v_norm = {};               // of each head
  bool values_from_keys = false;  // v is k as it comes
  float k_scale = 1, v_scale = 1;  // what k and v are divided by to be cached as e4m3
};

// Blocks that this worker probably reads next, so that they are fetched as the end of its own comes near.
struct NextBlocks {
  const int32_t* block_table = nullptr;
  int count = 0;         // 0: unknown
  ptrdiff_t offset = 0;  // bytes from this task's KV head to the one that is read there
};

// What was computed of these tokens' attention together with other sequences, which have the same K and V there: the
// results of the splits from split_begin on, up to `end`, which is where a tile ends.
struct PrefixResult {
  const float* partials = nullptr;  // one split after the other, each `partial_floats` of num_tokens; null: nothing was
  int num_tokens = 0;
  int token = 0;                    // the first of these tokens among them
  int split_begin = 0, end = 0;

  bool has_whole(int split) const { return split >= split_begin && (split + 1) * kKvSplit <= end; }
  bool has_part(int split) const { return split >= split_begin && split * kKvSplit < end; }
};

// The number of biases by distance in a row of `distance_bias`: from -span to span, and behind both ends the last one once
// more, so that a vector can be read from any distance on.
constexpr int kBiasPadding = 16, kMaxBiasSpan = 1 << 16;
constexpr int distance_biases(int span) { return 2 * (span + kBiasPadding) + 1; }

// What positions add to the scores of one head by what tokens contain: for each query and each key the product with each
// row of a table, of which `rows` [distance_biases(span)] says which one counts at a distance.
struct PositionScores {
  const int32_t* rows = nullptr;      // null: nothing is added
  int span = 0;
  const float* of_queries = nullptr;  // [num_tokens, stride], or null
  const float* of_keys = nullptr;     // [positions, stride], or null
  size_t stride = 0;
};

// All query heads of one KV head for a few consecutive tokens of one sequence.
//
// Or, for `attention_split`, for tokens of several sequences that have the same K and V up to `prefix_end`, where a
// tile ends, and all see what is there of the split.
struct AttentionArgs {
  Heads heads;
  int kv_head;
  const void* q;            // [tokens, q_stride] queries, heads * padded_dim used
  size_t q_stride;
  int num_tokens;           // times heads.group(): at most kAttentionRows, or one token
  int first_position;       // of the first of these tokens
  int window;               // 0: unlimited
  float scale;              // above 0; what k was divided by is a part of it
  float softcap;            // score = softcap * tanh(score / softcap); 0: none
  const float* alibi_slopes;  // [heads], or null: score -= slope * |key position - query position|
  const float* sinks;       // [heads], or null: scores of no token, which take part in the softmax and have no value
  const char* cache_head;   // this layer's and KV head's part of block 0
  size_t block_stride;      // bytes from there to its part of block 1
  const int32_t* block_table;
  void* scratch;            // attention_scratch_bytes
  float* out;               // [tokens, out_stride], heads * values used
  size_t out_stride;
  NextBlocks next = {};
  PrefixResult prefix = {};
  const int32_t* tokens = nullptr;     // of several sequences: [num_tokens], their numbers in q and `positions`; else null
  const int32_t* positions = nullptr;  // with `tokens`: of all tokens of q
  int prefix_end = 0;                  // with `tokens`
  float value_scale = 1;               // of the result: what v was divided by
  unsigned line_pairs = 0;             // 1: every second line of later blocks is prefetched, and the other one comes with it
  // [num_tokens], without `tokens`: the end of what each token sees, which does not descend; null: its own position is
  // the last one.
  const int32_t* visible_until = nullptr;
  // [heads, distance_biases(bias_span)], or null: score += the one of key position - query position
  const float* distance_bias = nullptr;
  int bias_span = 0;
  PositionScores position_scores = {};  // without `tokens`

  // The end of what the last token sees, and the splits that these tokens see.
  int end() const { return visible_until ? visible_until[num_tokens - 1] : first_position + num_tokens; }
  int split_begin() const { return window && first_position >= window ? (first_position + 1 - window) / kKvSplit : 0; }
  int split_end() const { return (end() - 1) / kKvSplit + 1; }
};

// Tokens that a convolution may be over, at most.
constexpr int kMaxConvTaps = 8;

// A causal depthwise convolution of some channels over consecutive tokens of one sequence, in place.
struct ConvolveArgs {
  float* x;                   // [tokens, stride], `channels` used; replaced by the result
  size_t stride;
  int num_tokens, channels;
  int taps;                   // 1 to kMaxConvTaps
  const float* weight;        // [taps, weight_stride]: the last row is for the token itself
  const float* bias;          // [channels], or null
  size_t weight_stride;
  float* state;               // [taps - 1, weight_stride]: what was convolved before, the oldest first; updated
  bool silu;                  // of the result
  const float* input_gate = nullptr;   // as x: multiplies what is convolved; or null
  const float* output_gate = nullptr;  // likewise the result
};

enum class Gate : int { kSigmoid, kSilu };

// The state of a recurrence is kept in blocks of this many columns: [blocks of value_dim][key_dim][kStateColumns].
constexpr int kStateColumns = 16;
constexpr size_t recurrence_state_floats(int key_dim, int value_dim) {
  return size_t(key_dim) * ((value_dim + kStateColumns - 1) / kStateColumns * kStateColumns);
}

// One head of a linear recurrence over consecutive tokens of one sequence. Its state S is [key_dim, value_dim]. delta:
// S = decay * S, then S += k (beta * (v - S^T k))^T; else S = decay * S + k (beta * v)^T. Then v = S^T q + skip * v.
struct RecurrenceArgs {
  const float* q;             // [tokens, stride], key_dim used
  const float* k;             // likewise
  float* v;                   // likewise, value_dim used; replaced by the result
  size_t stride;
  int num_tokens, key_dim, value_dim;
  const float* decay;         // [tokens, gate_stride], the first is used
  const float* beta;          // likewise
  size_t gate_stride;
  float* state;               // recurrence_state_floats, updated
  bool delta;
  float skip = 0;
};

struct SampleArgs {
  const float* logits;  // [vocab]
  int vocab;
  float temperature, top_p, min_p;
  int top_k;
  uint64_t seed;
  int position;
  float repetition_penalty, presence_penalty, frequency_penalty;
  const int32_t* history;
  int history_len, prompt_len;
  const int32_t* bias_ids;
  const float* bias_values;
  int bias_len;
  const uint32_t* mask;       // a bit a token, set for those allowed [vocab / 32 rounded up]; null: all are
  int target;                 // the token to report on, instead of sampling one; -1: none
  int num_logprobs;
  float logprob_temperature;  // what logits are divided by for log-probabilities
  float* row;           // scratch [vocab rounded up to 256]
  float* weights;       // scratch, likewise
  double* block_sums;   // scratch [vocab / 256 rounded up]
  float* maxima;        // scratch, twice that
  int32_t* indices;     // scratch [vocab]
  int32_t* token;
  float* logprob;
  int32_t* rank;              // of the target: one more than the tokens that are likelier
  int32_t* top_ids;
  float* top_logprobs;
};

// Attention over K and V of one type.
struct AttentionKernels {
  void (*whole)(const AttentionArgs&);
  // The same in two steps: the result of each split from split_begin() on, and then `attention_reduce`.
  void (*split)(const AttentionArgs&, int split, float* partial);
};

struct QuantizeArgs;  // quantize/quantize.h
struct SearchGridArgs;  // quantize/grid.h
struct RoundInputsArgs;

struct Kernels {
  const char* name;
  // By CacheType: bfloat16 where the cached elements are read as such and the level multiplies them, else float32.
  int query_bytes[kCacheTypes];
  int int8_step;  // elements of int8 K and V that lie side by side: 2, or 4 where they are multiplied as integers
  // Of GEMM inputs: rows of a packed tile; and rows that panels should pass by together, a multiple of those, so that
  // they stay in the second-level cache.
  int (*tile_rows)(const WeightFormat&);
  int (*row_block)(const WeightFormat&, int k);
  size_t (*row_bytes)(const WeightFormat&, int k);    // of one packed input row
  size_t (*panel_bytes)(const WeightFormat&, int k);  // of one packed panel
  void (*pack_weights)(const WeightFormat&, const PackWeightsArgs&);
  // For the formats that `block_format` gives.
  void (*pack_blocks)(const WeightFormat&, const PackBlocksArgs&);
  // For GGUF's types but MXFP4.
  void (*quantize_blocks)(const QuantizeArgs&);
  void (*search_grid)(const SearchGridArgs&);
  void (*round_inputs)(const RoundInputsArgs&);
  // Column `row` of a packed weight, as float: the embedding of a tied head.
  void (*unpack_row)(const WeightFormat&, const void* weight, int k, int row, float* out);
  // row_begin is a multiple of tile_rows.
  void (*pack_inputs)(const WeightFormat&, const PackInputsArgs&, int row_begin, int row_end);
  void (*gemm)(const WeightFormat&, const GemmArgs&);
  void (*project)(const ProjectArgs&);
  // Puts `count` inputs from `first` on, and `zeros` zeros, into a row that LoRA panels of that type are multiplied by.
  // Behind a row's last input there must be kStripeInputs zeros. An input takes at most as much room as a float.
  void (*pack_lora_panel_inputs)(DType, const float* x, int first, int count, int zeros, void* row);
  void (*normalize)(const Norm&, float* x, int size);
  // y += scale * norm(x); x is normalized in place.
  void (*add_normalized)(const Norm&, float* x, int size, float scale, float* y);
  void (*store_qkv)(CacheType, const StoreQkvArgs&);
  size_t (*attention_scratch_bytes)(const Heads&);
  AttentionKernels attention_by_type[kCacheTypes];
  const AttentionKernels& attention(CacheType type) const { return attention_by_type[static_cast<int>(type)]; }
  // Split-KV reduction: folds the results of all splits.
  void (*attention_reduce)(const AttentionArgs&, const float* partials);
  void (*convolve)(const ConvolveArgs&);
  void (*recur)(const RecurrenceArgs&);
  // x *= sigmoid(by), or by * sigmoid(by).
  void (*multiply_gate)(Gate, const float* by, int size, float* x);
  void (*sample)(const SampleArgs&);
  // Ceilings: operations done (a multiply and an add are two) or bytes read.
  double (*peak_float32)(int rounds);
  double (*peak_bfloat16)(int rounds);
  double (*peak_int8)(int rounds);
  double (*read_memory)(const void* data, size_t bytes);
};

}  // namespace tidewheel
