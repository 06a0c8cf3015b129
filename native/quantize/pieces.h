// Work in pieces, which threads take one after the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tidewheel {

// Calls `work(piece)` for each piece, in their order, in at most as many threads. It must not throw.
template <typename Work>
void for_pieces(int64_t pieces, int threads, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto take = [&] {
    for (int64_t piece; (piece = next.fetch_add(1)) < pieces;) work(piece);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(threads, pieces); ++i) others.emplace_back(take);
  take();
  for (std::thread& other : others) other.join();
}

}  // namespace tidewheel
