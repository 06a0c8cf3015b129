// Packed weights in the order of a file. In memory they are divided among groups of workers. The file's content does
// not depend on the number of groups or on what each of them owns.
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
  // Adds the next run in order. It is in `group`'s memory and consists of pieces of `piece_bytes`, which no group
  // boundary ever divides.
  void add(int group, char* data, size_t bytes, size_t piece_bytes);

  size_t bytes() const { return bytes_; }
  // All runs in order. Runs that follow each other in memory are joined.
  std::vector<std::span<const char>> spans() const;

  // Detects damaged files, but not attacks. Runs on the calling thread alone.
  uint64_t checksum() const;

  // Fills all runs from a file, from byte `offset` on. Each group fills its own runs. If the file cannot be read or the
  // checksum differs, returns false with all runs zeroed. Returns soon after `stop` becomes true, with the runs in any
  // state.
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
