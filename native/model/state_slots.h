// What recurrent layers keep of sequences: slots of float32, one for each sequence or snapshot. A slot holds all layers.
#pragma once

#include <span>

#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

class StateSlots {
 public:
  // While a model is put together: room in every slot for so many numbers of a layer. Returns where they begin.
  size_t add(size_t floats);
  // Throws std::bad_alloc.
  void allocate(int num_slots);

  bool empty() const { return floats_ == 0; }
  size_t bytes() const { return memory_.bytes(); }
  float* at(int slot, size_t offset) const { return reinterpret_cast<float*>(memory_.data()) + slot * floats_ + offset; }
  // The whole team calls it. Ends with a barrier.
  void copy(Worker& worker, int from, int to) const;

 private:
  size_t floats_ = 0;  // of a slot
  Arena memory_;
};

}  // namespace tidewheel
