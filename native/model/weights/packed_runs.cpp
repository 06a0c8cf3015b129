#include "model/weights/packed_runs.h"

#include <algorithm>
#include <cstring>

#include <unistd.h>

namespace tidewheel {
namespace {

constexpr size_t kReadBytes = size_t{1} << 19;  // read and summed at once, so that they stay in a core's cache

// FNV-1a over words in eight independent chains, so that memory limits its speed. The last words are padded with zeros.
uint64_t piece_checksum(const char* data, size_t size, size_t offset) {
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t chains[8], words[8];
  for (uint64_t& chain : chains) chain = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; i += sizeof words) {
    if (size - i < sizeof words) std::memset(words, 0, sizeof words);
    std::memcpy(words, data + i, std::min(size - i, sizeof words));
    for (size_t j = 0; j < 8; ++j) chains[j] = (chains[j] ^ words[j]) * kPrime;
  }
  uint64_t sum = offset;
  for (const uint64_t chain : chains) sum = (sum ^ chain ^ chain >> 32) * kPrime;
  return sum;
}

// The sum over pieces does not depend on their order.
uint64_t sum_pieces(const char* data, size_t size, size_t piece_bytes, size_t offset) {
  uint64_t sum = 0;
  for (size_t begin = 0; begin < size; begin += piece_bytes) sum += piece_checksum(data + begin, piece_bytes, offset + begin);
  return sum;
}

bool read_all(int file, char* to, size_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t count = pread(file, to, size, offset);
    if (count <= 0) return false;
    to += count;
    size -= static_cast<size_t>(count);
    offset += count;
  }
  return true;
}

}  // namespace

void PackedRuns::add(int group, char* data, size_t bytes, size_t piece_bytes) {
  if (bytes == 0) return;
  runs_.push_back({group, data, bytes, piece_bytes, bytes_});
  bytes_ += bytes;
}

std::vector<std::span<const char>> PackedRuns::spans() const {
  std::vector<std::span<const char>> spans;
  for (const Run& run : runs_) {
    if (!spans.empty() && spans.back().data() + spans.back().size() == run.data) {
      spans.back() = {spans.back().data(), spans.back().size() + run.bytes};
    } else {
      spans.emplace_back(run.data, run.bytes);
    }
  }
  return spans;
}

uint64_t PackedRuns::checksum() const {
  uint64_t sum = 0;
  for (const Run& run : runs_) sum += sum_pieces(run.data, run.bytes, run.piece_bytes, run.offset);
  return sum;
}

bool PackedRuns::read(int file, int64_t offset, uint64_t checksum, ThreadPool& pool, const std::atomic<bool>& stop) const {
  // A part of a run: bytes [begin, end), in whole pieces.
  struct Part {
    const Run* run;
    size_t begin, end;
  };
  std::vector<std::vector<Part>> parts(pool.ownership().groups());  // [groups]
  for (const Run& run : runs_) {
    const size_t size = std::max<size_t>(1, kReadBytes / run.piece_bytes) * run.piece_bytes;
    for (size_t begin = 0; begin < run.bytes; begin += size) {
      parts[run.group].push_back({&run, begin, std::min(begin + size, run.bytes)});
    }
  }
  const auto each_part = [&](auto&& visit) {
    pool.run([&](Worker& worker) {
      const std::vector<Part>& own = parts[worker.group()];
      worker.share_in_group(static_cast<int64_t>(own.size()), 1, [&](int64_t i, int64_t) {
        if (!stop.load(std::memory_order_relaxed)) visit(*own[i].run, own[i].begin, own[i].end);
      });
    });
  };
  std::atomic<uint64_t> sum = 0;
  std::atomic<bool> complete = true;
  each_part([&](const Run& run, size_t begin, size_t end) {
    char* data = run.data + begin;
    const size_t at = run.offset + begin;
    if (read_all(file, data, end - begin, offset + static_cast<int64_t>(at))) {
      sum += sum_pieces(data, end - begin, run.piece_bytes, at);
    } else {
      complete = false;
    }
  });
  if (complete && sum == checksum) return true;
  // Each group clears its own runs, because it may be the first to touch them.
  each_part([](const Run& run, size_t begin, size_t end) { std::memset(run.data + begin, 0, end - begin); });
  return false;
}

}  // namespace tidewheel
