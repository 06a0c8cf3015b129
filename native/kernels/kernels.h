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
// Inputs that share a scale when a row is quantized for int8 and int4 weights.
constexpr int kRowGroup = 32;

// How a weight is stored. Quantized ones meet activations quantized to int8:
// kInt8: a float16 scale for every 32 inputs of a column, likewise a scale for every 32 inputs of a row.
// kInt8Channel: a float32 scale a column, and one a row.
// kInt4: 4 bits an input, a float16 scale for every `group` inputs of a column, w = scale * (q - 8), or
// w = scale * (q - zero) with zero points; rows as for kInt8.
enum class WeightKind : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt8Channel = 4, kInt4 = 5 };

struct WeightFormat {
  WeightKind kind = WeightKind::kFloat32;
  int group = kRowGroup;  // kInt4: 32, 64 or 128
  bool zero_points = false;
};

// Of what packed weights look like and hold. Raise it with every change of layout, of order in the arena, or of the
// numbers that quantization chooses: weights that were packed and kept under another version are not used.
constexpr int kPackedVersion = 1;

// KV blocks of 16 tokens. A block of one KV head holds K then V, `head_stride` elements each 16 tokens.
// bfloat16: K [dim/2][16][2], V [16/2][dim][2]; float32 and float16: K [dim][16], V [16][dim].
constexpr int kBlockTokens = 16;
// Attention visits the context in tiles that start at multiples of this many tokens, whoever else is in the batch.
constexpr int kAttentionTile = 128;
constexpr int kAttentionRows = 48;  // query rows (tokens x heads of a group) of one attention task, at most

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };

enum class Epilogue : int {
  kStore,       // y = x W^T + bias
  kAdd,         // y += x W^T + bias
  kActivation,  // y = act(x W^T + bias)
  kGated,       // panels hold 16 gate then 16 up columns: y = act(gate) * up
};

struct GemmArgs {
  const void* x;       // packed rows, from row 0
  int num_rows;        // all of them
  int row_begin, row_end;  // row_begin is a multiple of tile_rows
  const void* weight;  // packed
  int k;
  int n;               // columns of the packed weight, a multiple of kPanel unless kStore or kAdd
  int panel_begin, panel_end;
  const float* bias;   // [n] in packed column order, or null
  Epilogue epilogue;
  Activation activation;
  float* y;            // [rows, n], or [rows, n / 2] for kGated
  size_t y_stride;     // elements
};

struct PackArgs {
  const void* source;  // [rows, cols], element strides
  DType source_type;
  ptrdiff_t row_stride, col_stride;
  int rows, cols;
  void* weight;        // packed, zeroed
  int k;
  // Row r of the source becomes packed column (r / group) * group_stride + r % group + offset.
  int group, group_stride, offset;
  int row_begin, row_end;
};

struct Norm {
  bool layer_norm = false;  // else RMS
  float eps = 0;
  float* weight = nullptr;  // null: no norm
  float* bias = nullptr;    // or null
};

// GEMM inputs. They are packed in tiles of tile_rows rows, the last of what is left, so that a tile is read in order.
struct RowsArgs {
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
  int padded_dim() const { return (head_dim + 15) / 16 * 16; }
  int group() const { return num_heads / num_kv_heads; }
  size_t block_elements() const { return size_t{2} * num_kv_heads * padded_dim() * kBlockTokens; }
};

// One token: q and k heads are normalized and rotated, q is stored as activations, k and v go to the cache.
struct PrepareArgs {
  Heads heads;
  float* qkv;               // [(heads + 2 kv_heads) * head_dim], changed in place
  const float* q_norm;      // [head_dim] or null
  const float* k_norm;
  float norm_eps;
  const float* cos;         // [rotary_pairs], or null
  const float* sin;
  int rotary_pairs;
  void* q;                  // [heads, padded_dim] activations of the cache's type
  void* block;              // of the cache: this layer's, this token's
  int slot;
};

// All query heads of one KV head for a few consecutive tokens of one sequence.
struct AttentionArgs {
  Heads heads;
  int kv_head;
  const void* q;            // [tokens, q_stride] activations of the cache's type, heads * padded_dim used
  size_t q_stride;
  int num_tokens;           // times heads.group(): at most kAttentionRows, or one token
  int first_position;       // of the first of these tokens
  int window;               // 0: unlimited
  float scale;
  const char* cache;        // this layer's blocks
  const int32_t* block_table;
  void* scratch;            // attention_scratch_bytes
  DType out_type;           // of the weights that read the result; the cache and q may be of another
  void* out;                // [tokens, out_stride] activations of out_type, heads * head_dim used
  size_t out_stride;
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
  int num_logprobs;
  float* row;           // scratch [vocab rounded up to 256]
  float* weights;       // scratch, likewise
  double* block_sums;   // scratch [vocab / 256 rounded up]
  int32_t* indices;     // scratch [vocab]
  int32_t* token;
  float* logprob;
  int32_t* top_ids;
  float* top_logprobs;
};

struct Kernels {
  const char* name;
  int activation_bytes[3];  // by DType
  int tile_rows;
  size_t (*row_bytes)(const WeightFormat&, int k);    // of one packed input row
  size_t (*panel_bytes)(const WeightFormat&, int k);  // of one packed panel
  void (*pack)(const WeightFormat&, const PackArgs&);
  // Column `row` of a packed weight, as float: the embedding of a tied head.
  void (*unpack_row)(const WeightFormat&, const void* weight, int k, int row, float* out);
  // row_begin is a multiple of tile_rows.
  void (*pack_rows)(const WeightFormat&, const RowsArgs&, int row_begin, int row_end);
  void (*gemm)(const WeightFormat&, const GemmArgs&);
  void (*normalize)(const Norm&, float* x, int size);
  void (*prepare)(DType, const PrepareArgs&);
  size_t (*attention_scratch_bytes)(const Heads&);
  void (*attention)(DType, const AttentionArgs&);
  void (*sample)(const SampleArgs&);
  // Ceilings: operations done (a multiply and an add are two) or bytes read.
  double (*peak_float32)(int rounds);
  double (*peak_bfloat16)(int rounds);
  double (*peak_int8)(int rounds);
  double (*read_memory)(const void* data, size_t bytes);
};

namespace scalar { extern const Kernels kKernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_bf16 { extern const Kernels kKernels; }
#endif

}  // namespace tidewheel
