// All weights of a model, packed for the kernels. Each group of workers owns some panels of every matrix: they lie in an
// arena of its own and are written by it alone, so that they are on its node.
#pragma once

#include <atomic>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/packed_runs.h"
#include "runtime/arena.h"
#include "runtime/groups.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

struct Linear {
  WeightFormat format;
  int n = 0, k = 0;       // packed columns (rows of the weight) and inputs
  struct Slice {
    Range panels;
    char* weight;
  };
  std::vector<Slice> slices;  // [groups], or none if the model has no such matrix
  float* bias = nullptr;      // [n] in packed order, or null

  // The slice that has a packed column.
  const Slice& slice_of(int column) const {
    size_t i = 0;
    while (slices[i].panels.end <= column / kPanel) ++i;
    return slices[i];
  }
};

struct Layer {
  Norm attention_norm, mlp_norm, q_norm, k_norm;
  Linear qkv, out, up, down;  // `up` holds gate and up interleaved by 16 columns if gated
};

// A tensor as it lies in a checkpoint. Strides are in elements.
struct Source {
  std::string name;
  const void* data;
  DType type;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  bool swapped = false;  // its bytes lie in the other order than this machine's
  bool mapped = false;  // a view of a mapped file: its pages may be given back, and come back when they are read again
};

// What a load ends with when it is told to stop.
struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("loading was stopped") {}
};

// How the weights are to be stored. `embedding` is the head's too. Learned positions are only looked up: they stay floats.
struct WeightFormats {
  WeightFormat layers, down, embedding, positions;
};

class Weights {
 public:
  Weights(const ModelConfig& config, const Kernels& kernels, const WeightFormats& formats, const Ownership& ownership);

  // Pack tensors, with all of the pool and in this order; the memory behind those that are mapped is given back as they
  // are done. Throws std::invalid_argument for a name or a shape that is not expected, before anything is packed, and
  // Stopped soon after `stop` has become true.
  void set(std::span<const Source> sources, ThreadPool& pool, const std::atomic<bool>& stop);

  // Throws std::invalid_argument, naming a tensor that was never set.
  void check_complete() const;

  // All packed weights, vectors included. What they hold is a function of what was set, the formats, the ISA level and
  // kPackedVersion.
  const PackedRuns& packed() const { return packed_; }

  // In place of `set`: takes packed weights from a file, `offset` bytes behind its start, with all of the pool. False
  // if they cannot be read or their checksum is another; then everything is as before and must be set. Throws Stopped.
  bool read_packed(int file, int64_t offset, uint64_t checksum, ThreadPool& pool, const std::atomic<bool>& stop);

  const Arena& memory(int group) const { return arenas_[group]; }

  Linear embed, positions, project_in, project_out, head;
  Norm final_norm;
  std::vector<Layer> layers;

 private:
  // Where a named tensor goes: a matrix into packed columns, a vector into floats. Row r becomes column
  // (r / group) * group_stride + r % group + offset.
  struct Slot {
    Linear* linear = nullptr;
    float** vector = nullptr;
    int rows = 0, cols = 0;  // cols 0: a vector
    int group = 0, group_stride = 0, offset = 0;
    bool done = false;

    int column(int row) const { return row / group * group_stride + row % group + offset; }
    // The first row that lands in `panel` or behind it.
    int first_row(int panel) const;
  };

  void plan_linear(const std::string& name, Linear& linear, const WeightFormat& format, int rows, int cols, bool bias,
                   int n, int group, int group_stride, int offset);
  void plan_linear(const std::string& name, Linear& linear, const WeightFormat& format, int rows, int cols, bool bias);
  void plan_norm(const std::string& name, Norm& norm, const NormConfig& config, int size);
  void plan_vector(const std::string& name, float*& vector, int size);
  void plan(const ModelConfig& config, const WeightFormats& formats);
  void place(const Ownership& ownership);
  Slot& find(const Source& source);
  // Rows that a group owns.
  Range rows_of(const Slot& slot, int group) const;
  // `room` takes the rows of a swapped source.
  void pack(const Slot& slot, const Source& source, int group, int row_begin, int row_end, char* room) const;

  const Kernels& kernels_;
  std::map<std::string, Slot> slots_;
  std::vector<Arena> arenas_;  // [groups]; vectors, which all read, are in the first
  PackedRuns packed_;
};

}  // namespace tidewheel
