// Packed weights in the order of a file, wherever they lie in memory: what a file holds depends neither on how many
// groups of workers there are nor on what each of them owns.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/thread_pool.h"

namespace tidewheel {

class PackedRuns {
 public:
  // The next run in order. It is in `group`'s memory and consists of pieces of `piece_bytes` that no group boundary
  // ever divides.
  void add(int group, char* data, size_t bytes, size_t piece_bytes);

  size_t bytes() const { return bytes_; }
  // Those in order that do not follow each other in memory.
  std::vector<std::span<const char>> spans() const;

  // Against torn and flipped bytes, not against malice. On the calling thread alone.
  uint64_t checksum() const;

  // Fills all runs from a file, `offset` bytes behind its start, each group its own. False, with all runs zeroed, if
  // they cannot be read or their checksum is another. When `stop` becomes true it returns soon, with runs in any state.
  bool read(int file, int64_t offset, uint64_t checksum, ThreadPool& pool, const std::atomic<bool>& stop) const;

 private:
  struct Run {
    int group;
    char* data;
    size_t bytes, piece_bytes, offset;  // in the file
  };

  std::vector<Run> runs_;
  size_t bytes_ = 0;
};

}  // namespace tidewheel
