// Which sequences of a step begin with the same KV blocks. What they attend to there is computed for all of them
// together, so that K and V are read once ("cascade attention",
// https://flashinfer.ai/2024/02/02/cascade-inference.html). It cannot change a result: to a query row, the KV splits
// and tiles of attention are the same as in its own task.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// Tasks of several sequences with the same K and V at some positions, which all of them see.
struct CommonPrefix {
  int task;                     // one of them: all have its blocks
  int token_begin, num_tokens;  // of CommonPrefixes::tokens()
  int begin, end;               // positions: where a KV split begins, and where a tile ends
  int last_position;            // of its tokens
  int64_t partials;             // where the results of its KV splits lie, in floats

  int split_begin() const { return begin / kKvSplit; }
  int split_end() const { return (end + kKvSplit - 1) / kKvSplit; }
  // The first KV split that every token sees as a whole in a layer with this window.
  int first_split(int window) const;
};

// The arguments for a prefix: those of its task, with the `tokens` that have it. `q` and `positions` are of all tokens.
AttentionArgs of_prefix(AttentionArgs args, const CommonPrefix& prefix, std::span<const int32_t> tokens,
                        std::span<const int32_t> positions, const void* q);

class CommonPrefixes {
 public:
  // Tiles that a step must save, and at least one for each worker: below that, their meeting costs more.
  static constexpr int kMinSaved = 4;

  // A task that may take part.
  struct Member {
    int task, token_begin, num_tokens;
    const int32_t* blocks;  // of its sequence
    int first_position;     // of its tokens: those before it are in the cache by now
    int last_position() const { return first_position + num_tokens - 1; }
    int tiles() const { return first_position / kAttentionTile; }  // that all of its tokens see
  };
  // What a worker does at a time, for one KV head: a KV split of a prefix.
  struct Unit {
    int prefix, split;
    int64_t cost;
  };
  // A task's part of a prefix; prefix is -1 if it has none.
  struct Place {
    int prefix = -1, token = 0;
  };

  // Of layers with windows up to `window` tokens (0: unlimited), for at most `max_tokens` together, whose results over
  // a KV split take `floats_per_token`. Prefixes that save too little for `workers` workers are left alone.
  CommonPrefixes(int window, int max_tokens, int64_t floats_per_token, int workers)
      : window_(window), max_tokens_(max_tokens), floats_per_token_(floats_per_token),
        min_saved_(std::max(kMinSaved, workers)) {}

  // Finds the prefixes of these members of `num_tasks` tasks, which need at most `room` floats for their results.
  // Returns how many they need. It takes time in proportion to the block tables, times the logarithm of the members.
  int64_t find(std::span<const Member> members, int num_tasks, int64_t room);

  std::span<const Unit> units() const { return units_; }  // the most expensive first
  const CommonPrefix& prefix(int index) const { return prefixes_[index]; }
  std::span<const int32_t> tokens(const CommonPrefix& prefix) const {
    return {tokens_.data() + prefix.token_begin, size_t(prefix.num_tokens)};
  }
  Place place(int task) const { return places_.empty() ? Place{} : places_[task]; }

 private:
  // Orders members so that those with a common prefix are neighbours, and counts the tiles that neighbours have in
  // common.
  void sort(std::span<const Member> members);
  // Divides the sorted members into runs that save most, as the number of members of each run.
  void choose_runs();
  void add(size_t begin, size_t end, int64_t& used, int64_t room);

  int window_, max_tokens_;
  int64_t floats_per_token_;
  int min_saved_;
  int first_tile_ = 0;           // before it, not everyone sees everything
  std::vector<Member> members_;  // sorted
  std::vector<int> common_;      // tiles from first_tile_ on that a member has in common with the one before
  std::vector<int64_t> saved_;   // tiles that need not be read again if the members before are divided as well as possible
  std::vector<int> run_;         // members of the last run of that
  std::vector<CommonPrefix> prefixes_;
  std::vector<int32_t> tokens_;
  std::vector<Place> places_;
  std::vector<Unit> units_;
};

}  // namespace tidewheel
