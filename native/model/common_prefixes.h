// Finds sequences of a step that begin with the same KV blocks. Their attention to these blocks is computed together,
// so that K and V are read once ("cascade attention", https://flashinfer.ai/2024/02/02/cascade-inference.html). This
// cannot change a result: a query row has the same KV splits and tiles as in its own task.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// Tasks of several sequences that have the same K and V at some positions, which all of their tokens see.
struct CommonPrefix {
  int task;                     // one of the tasks; all have its blocks
  int token_begin, num_tokens;  // in CommonPrefixes::tokens()
  int begin, end;               // positions: the start of a KV split, and the end of a tile
  int last_position;            // of its tokens
  int64_t partials;             // the offset of its KV splits' results, in floats

  int split_begin() const { return begin / kKvSplit; }
  int split_end() const { return (end + kKvSplit - 1) / kKvSplit; }
  // The first KV split that every token sees completely in a layer with this window.
  int first_split(int window) const;
};

// The arguments for a prefix: those of its task, but for the prefix's `tokens`. `q` and `positions` cover all tokens.
AttentionArgs of_prefix(AttentionArgs args, const CommonPrefix& prefix, std::span<const int32_t> tokens,
                        std::span<const int32_t> positions, const void* q);

class CommonPrefixes {
 public:
  // The minimum number of tiles that a step must save; with more workers, one tile for each. Below that, the extra
  // barrier costs more than it saves.
  static constexpr int kMinSaved = 4;

  // A task that may share a prefix.
  struct Member {
    int task, token_begin, num_tokens;
    const int32_t* blocks;  // its sequence's blocks
    int first_position;     // of its tokens; all positions before it are already cached
    int last_position() const { return first_position + num_tokens - 1; }
    int tiles() const { return first_position / kAttentionTile; }  // seen by all of its tokens
  };
  // What a worker computes at a time, for one KV head: one KV split of a prefix.
  struct Unit {
    int prefix, split;
    int64_t cost;
  };
  // The prefix of a task, and the index of its first token there. `prefix` is -1 if it has none.
  struct Place {
    int prefix = -1, token = 0;
  };

  // Prefixes for layers with windows up to `window` tokens (0: unlimited). At most `max_tokens` tokens are computed
  // together. Each token's results over a KV split take `floats_per_token` floats. Prefixes that save too little for
  // `workers` workers are not used.
  CommonPrefixes(int window, int max_tokens, int64_t floats_per_token, int workers)
      : window_(window), max_tokens_(max_tokens), floats_per_token_(floats_per_token),
        min_saved_(std::max(kMinSaved, workers)) {}

  // Finds the prefixes of these members among `num_tasks` tasks. Their results need at most `room` floats. Returns the
  // number of floats. The time is proportional to the size of the block tables times the logarithm of the number of
  // members.
  int64_t find(std::span<const Member> members, int num_tasks, int64_t room);

  std::span<const Unit> units() const { return units_; }  // the most expensive first
  const CommonPrefix& prefix(int index) const { return prefixes_[index]; }
  std::span<const int32_t> tokens(const CommonPrefix& prefix) const {
    return {tokens_.data() + prefix.token_begin, size_t(prefix.num_tokens)};
  }
  Place place(int task) const { return places_.empty() ? Place{} : places_[task]; }

 private:
  // Sorts members so that members with a common prefix are neighbours, and counts the tiles that neighbours have in
  // common.
  void sort(std::span<const Member> members);
  // Divides the sorted members into the runs that save the most tiles, and stores each run's number of members.
  void choose_runs();
  void add(size_t begin, size_t end, int64_t& used, int64_t room);

  int window_, max_tokens_;
  int64_t floats_per_token_;
  int min_saved_;
  int first_tile_ = 0;           // earlier tiles are not seen by every member
  std::vector<Member> members_;  // sorted
  std::vector<int> common_;      // tiles, from first_tile_ on, that a member shares with the previous member
  std::vector<int64_t> saved_;   // reads of tiles saved by the best division of the members before this index
  std::vector<int> run_;         // the number of members in the last run of that division
  std::vector<CommonPrefix> prefixes_;
  std::vector<int32_t> tokens_;
  std::vector<Place> places_;
  std::vector<Unit> units_;
};

}  // namespace tidewheel
