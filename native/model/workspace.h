// Memory for activations, which the parts of a model use one after the other, and scratch memory for every worker. It
// is laid out while a model is built, and then allocated once.
#pragma once

#include <algorithm>
#include <vector>

#include "model/require.h"
#include "runtime/arena.h"
#include "runtime/groups.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

// A place in a workspace, with `stride` elements for each row.
template <typename T>
struct Buffer {
  size_t offset = 0, stride = 0;
};

class Workspace {
 public:
  // While a Turn exists, new buffers get memory of their own. When it ends, later buffers may use that memory.
  class Turn {
   public:
    explicit Turn(Workspace& workspace) : workspace_(workspace), begin_(workspace.next_) {}
    ~Turn() { workspace_.next_ = begin_; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Workspace& workspace_;
    const size_t begin_;
  };

  // `rows`: the maximum number of tokens in a step, or of rows that want logits at a time.
  explicit Workspace(size_t rows) : rows_(rows) {}

  size_t rows() const { return rows_; }

  template <typename T>
  Buffer<T> add(size_t stride) {
    const Buffer<T> buffer{next_, stride};
    next_ += round_up(rows_ * stride * sizeof(T), kPage);
    bytes_ = std::max(bytes_, next_);
    return buffer;
  }
  void need_scratch(size_t bytes) { scratch_stride_ = std::max(scratch_stride_, round_up(bytes, 64)); }

  // Throws std::bad_alloc.
  void allocate(const Ownership& ownership);
  // Gives the memory back until it is used again. Nothing in it outlives a step.
  void forget();
  // Of the activations, without scratch memory.
  size_t bytes() const { return memory_.bytes(); }

  template <typename T>
  T* rows(const Buffer<T>& buffer) const {
    return reinterpret_cast<T*>(memory_.data() + buffer.offset);
  }
  char* scratch(const Worker& worker) const {
    return scratch_[worker.group()].data() + worker.index_in_group() * scratch_stride_;
  }

 private:
  static constexpr size_t kPage = 4096;

  const size_t rows_;
  size_t next_ = 0, bytes_ = 0, scratch_stride_ = 0;
  Arena memory_;
  std::vector<Arena> scratch_;  // [groups], one piece for each worker
};

}  // namespace tidewheel
