// All weights of a model, packed for the kernels. Each group of workers owns some panels of every matrix. It has its
// own arena for them. Only this group writes to the arena, so the panels are in its node's memory.
#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "model/plan.h"
#include "model/weights/linear.h"
#include "model/weights/packed_runs.h"
#include "model/weights/source.h"
#include "runtime/arena.h"
#include "runtime/groups.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

// Thrown by a load that was stopped.
struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("loading was stopped") {}
};

// The place of the rows of a tensor [rows, cols].
struct MatrixPlace {
  const Linear* linear;
  Columns columns;
  int rows, cols;
};

class Weights {
 public:
  // By the names of matrices' tensors: how to store each matrix, and the order of its inputs if it differs from the
  // model's.
  Weights(const Kernels& kernels, std::map<std::string, WeightFormat> formats, InputOrders orders = {});

  // The parts of a model name their tensors, and the places where each is loaded to. Those places must not move
  // afterwards. All these functions throw std::invalid_argument for a name that is taken. A matrix also needs a format.
  // Tensors that are added to one matrix one after the other may be stored in different ways; the matrix then becomes
  // several (Linear::next). Tensors whose columns alternate must be stored in the same way.
  void add_matrix(const std::string& name, Linear& matrix, int rows, int cols);
  // NAME.weight and NAME.bias: a whole matrix, or some of its columns.
  void add_linear(const std::string& name, Linear& linear, int rows, int cols, bool bias);
  void add_linear(const std::string& name, Linear& linear, int rows, int cols, bool bias, const Columns& columns);
  // NAME.bias of a matrix that has been added.
  void add_bias(const std::string& name, Linear& linear);
  void add_vector(const std::string& name, float*& vector, int size);
  // NAME.weight and NAME.bias, as far as the plan has them. Without a plan there is no norm.
  void add_norm(const std::string& name, Norm& norm, const std::optional<NormPlan>& plan, int size);

  // Whether two matrices are stored in the same way, with their inputs in the same order. Throws std::invalid_argument
  // if one has no format.
  bool agree(const std::string& a, const std::string& b) const;

  // The place of the tensor with this name; empty if there is none, or it is not a matrix.
  std::optional<MatrixPlace> place_of(const std::string& name) const;

  // All matrices, each with the name of one of its tensors.
  const std::map<const Linear*, std::string>& matrices() const { return matrices_; }

  // Allocates all weights. Called once, after all are named. Throws std::bad_alloc, and std::invalid_argument for a
  // format of an unknown tensor.
  void place(const Ownership& ownership);

  // Packs tensors in this order, with all threads of the pool. Memory of mapped tensors is freed as soon as they are
  // packed. Returns whether all their numbers are finite, as far as `are_finite` looks. Throws std::invalid_argument for
  // an unexpected name or shape, or for a quantized tensor of another format than its matrix, before anything is packed.
  // Throws Stopped soon after `stop` becomes true.
  bool set(std::span<const Source> sources, ThreadPool& pool, const std::atomic<bool>& stop);

  // Throws std::invalid_argument with the name of a tensor that was never set, if there is one.
  void check_complete() const;

  // All packed weights, vectors included. Their content depends only on the tensors that were set, the plan, its
  // formats, the ISA level and kPackedVersion.
  const PackedRuns& packed() const { return packed_; }

  // Instead of `set`: reads packed weights from a file, from byte `offset` on, with all threads of the pool. If they
  // cannot be read or the checksum differs, returns false and sets nothing. Throws Stopped.
  bool read_packed(int file, int64_t offset, uint64_t checksum, ThreadPool& pool, const std::atomic<bool>& stop);

  const Arena& memory(int group) const { return arenas_[group]; }

 private:
  // Where a named tensor goes: a matrix into packed columns, a vector into floats.
  struct Slot {
    Linear* linear = nullptr;  // for a bias too
    float** vector = nullptr;
    int rows = 0, cols = 0;  // cols 0: a vector
    Columns columns = {};
    float added = 0;         // added to every element of a vector
    bool done = false;
  };

  void add(const std::string& name, const Slot& slot);
  const WeightFormat& format_of(const std::string& name) const;
  const std::vector<int32_t>* order_of(const std::string& name) const;
  // Returns the Linear of the chain that has the tensor, and the tensor's columns there.
  std::pair<Linear*, Columns> add_matrix(const std::string& name, Linear& matrix, int rows, int cols, Columns columns);
  static bool is_unpacked(const Slot& slot) { return slot.cols && slot.linear->unpacked; }
  Slot& find(const Source& source);
  // The rows that a group owns.
  Range rows_of(const Slot& slot, int group) const;
  // `room` is memory for rows that are swapped or reordered.
  void pack(const Slot& slot, const Source& source, int group, int row_begin, int row_end, char* room) const;

  const Kernels& kernels_;
  const std::map<std::string, WeightFormat> formats_;
  const InputOrders orders_;
  std::map<std::string, Slot> slots_;
  std::map<const Linear*, std::string> matrices_;
  std::vector<Arena> arenas_;  // [groups]; vectors, which all groups read, are in the first
  PackedRuns packed_;
};

}  // namespace tidewheel
