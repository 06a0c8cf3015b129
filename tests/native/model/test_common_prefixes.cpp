#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "model/common_prefixes.h"
#include "small_model.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

constexpr int kRoom = 1 << 20;

// Sequences of one token each, or some more, with tables of block numbers.
class Tables {
 public:
  explicit Tables(int workers = 2) : workers_(workers) {}

  // A sequence whose first `common` blocks are those of an earlier one.
  void add(int parent, int common, int position, int num_tokens = 1) {
    std::vector<int32_t> table(position / kBlockTokens + 1);
    for (size_t b = 0; b < table.size(); ++b) {
      table[b] = static_cast<int>(b) < common ? tables_[parent][b] : next_++;
    }
    tables_.push_back(std::move(table));
    members_.push_back({static_cast<int>(members_.size()), tokens_, num_tokens, nullptr, position});
    tokens_ += num_tokens;
  }

  // The numbers of the sequences that have a prefix together, and where it begins and ends.
  struct Found {
    std::set<int> sequences;
    int begin, end;

    bool operator==(const Found&) const = default;
    bool operator<(const Found& other) const { return sequences < other.sequences; }
  };
  std::set<Found> find(int window = 0, int max_tokens = 16, int64_t room = kRoom) {
    for (size_t s = 0; s < tables_.size(); ++s) members_[s].blocks = tables_[s].data();
    CommonPrefixes prefixes(window, max_tokens, kFloats, workers_);
    const int64_t used = prefixes.find(members_, static_cast<int>(members_.size()), room);
    CHECK(used <= room);
    std::set<Found> found;
    std::vector<std::vector<int>> splits;
    int64_t end = 0;
    for (const CommonPrefixes::Member& member : members_) {
      const auto place = prefixes.place(member.task);
      if (place.prefix < 0) continue;
      const CommonPrefix& prefix = prefixes.prefix(place.prefix);
      CHECK(prefix.begin % kKvSplit == 0);
      CHECK(prefix.end % kAttentionTile == 0);
      CHECK(prefix.end > prefix.begin);
      CHECK(prefix.num_tokens <= max_tokens);
      CHECK(prefix.end <= member.first_position);
      if (window) CHECK(prefix.begin >= member.last_position() + 1 - window);
      const auto tokens = prefixes.tokens(prefix);
      for (int t = 0; t < member.num_tokens; ++t) CHECK(tokens[place.token + t] == member.token_begin + t);
      const int32_t* const one = tables_[prefix.task].data();
      CHECK(std::equal(one + prefix.begin / kBlockTokens, one + prefix.end / kBlockTokens, member.blocks + prefix.begin / kBlockTokens));
      end = std::max(end, prefix.partials + kFloats * prefix.num_tokens * (prefix.split_end() - prefix.split_begin()));
      Found mine{{}, prefix.begin, prefix.end};
      for (const CommonPrefixes::Member& other : members_) {
        if (prefixes.place(other.task).prefix == place.prefix) mine.sequences.insert(other.task);
      }
      found.insert(mine);
    }
    CHECK(end == used);
    size_t units = 0;
    for (const Found& each : found) units += (each.end - each.begin + kKvSplit - 1) / kKvSplit;
    CHECK(prefixes.units().size() == units);
    return found;
  }

 private:
  static constexpr int64_t kFloats = 100;
  int workers_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<CommonPrefixes::Member> members_;
  int tokens_ = 0;
  int32_t next_ = 0;
};

}  // namespace

TEST_CASE("sequences that begin with the same blocks have a prefix, up to the tile that ends before any differs") {
  Tables tables;
  tables.add(0, 0, 2000);
  tables.add(0, 100, 1700);  // 1600 tokens
  tables.add(0, 0, 3000);    // its own
  tables.add(0, 93, 1490, 3);
  CHECK(tables.find() == std::set<Tables::Found>{{{0, 1, 3}, 0, 1408}});
  CHECK(tables.find(0, 4) == std::set<Tables::Found>{{{0, 1}, 0, 1536}});  // no room for all tokens
  CHECK(tables.find(0, 1).empty());
  CHECK(tables.find(0, 16, 5 * 100 * 2) == std::set<Tables::Found>{{{0, 1, 3}, 0, 1024}});  // for two KV splits
  CHECK(tables.find(0, 16, 10).empty());
}

TEST_CASE("the prefixes that save most are chosen") {
  Tables tables;
  tables.add(0, 0, 5000);
  tables.add(0, 8, 5000);  // a tile of the first one's
  tables.add(0, 256, 5000);
  tables.add(1, 256, 5000);
  tables.add(1, 260, 5000);
  CHECK(tables.find() == std::set<Tables::Found>{{{0, 2}, 0, 4096}, {{1, 3, 4}, 0, 4096}});
  tables.add(0, 7, 5000);  // less than a tile
  CHECK(tables.find().size() == 2);
}

TEST_CASE("a prefix that saves little is left alone") {
  for (const int workers : {2, 4, 5}) {
    Tables tables(workers);
    tables.add(0, 0, 600);
    tables.add(0, 32, 600);
    CHECK(tables.find().size() == (workers <= 4 ? 1 : 0));
    tables.add(0, 31, 600);  // two sequences save three tiles each
    CHECK(tables.find().size() == 1);
  }
  Tables tables;
  tables.add(0, 0, 600);
  tables.add(0, 31, 600);
  CHECK(tables.find().empty());
}

TEST_CASE("blocks that a window has left behind do not count") {
  Tables tables;
  tables.add(0, 0, 4100);
  for (const int position : {4140, 4180}) tables.add(0, 256, position);
  CHECK(tables.find(3000) == std::set<Tables::Found>{{{0, 1, 2}, 1536, 4096}});
  CHECK(tables.find(200).empty());
}

TEST_CASE("logits are the same to the bit alone and with a common prefix, for every type of cache") {
  struct Case {
    std::vector<Fork> forks;
    std::vector<int> counts;
  };
  constexpr int kLong = kLongPrompt, kCommon = kLong / kBlockTokens * kBlockTokens - 32;
  const Case cases[] = {
      // A chunk of a prompt among them.
      {{{0, 0, kLong}, {0, kCommon, kCommon + 34}, {0, kCommon, kCommon + 1}, {1, 400, 450}}, {1, 1, 1, 37}},
      {{{0, 0, 700}, {0, 640, 690}, {0, 0, 660}, {2, 656, 665}}, {1, 1, 1, 1}},     // two prefixes
      {{{0, 0, 740}, {0, 720, 725}, {0, 640, 700}, {0, 512, 600}}, {3, 1, 2, 3}},   // drafts
  };
  const WeightFormat format{WeightKind::kBFloat16};
  for (const Kernels* kernels : tested_kernels()) {
    if (kernels->name == std::string("scalar")) continue;  // it would take long
    for (size_t i = 0; i < kModelCacheTypes; ++i) {
      const CacheType type = kAllCacheTypes[i];
      CAPTURE(kernels->name);
      CAPTURE(name_of(type));
      SmallModel alone(*kernels, format, type, {{0}});
      SmallModel groups(*kernels, format, type, {{0}, {1}}), threads(*kernels, format, type, {{0, 1}});
      // All of them for the best level, and one for each type for the others, which share what knows of prefixes.
      const bool is_best = kStride == 1 && kernels == &choose_kernels("auto");
      for (size_t c = 0; c < std::size(cases); ++c) {
        if (!is_best && c != i % std::size(cases)) continue;
        const Case& each = cases[c];
        const auto expected = alone.run_forks(each.forks, each.counts, 2, false);
        CHECK(groups.run_forks(each.forks, each.counts, 2, true) == expected);
        if (kStride == 1) CHECK(threads.run_forks(each.forks, each.counts, 2, true) == expected);
      }
    }
  }
}
