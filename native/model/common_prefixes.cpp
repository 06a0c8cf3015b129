#include "model/common_prefixes.h"

#include <algorithm>
#include <cstring>

namespace tidewheel {
namespace {

constexpr int kTileBlocks = kAttentionTile / kBlockTokens;
constexpr int kSplitTiles = kKvSplit / kAttentionTile;

int first_whole_split(int last_position, int window) {
  const int begin = window ? std::max(last_position + 1 - window, 0) : 0;
  return (begin + kKvSplit - 1) / kKvSplit;
}

}  // namespace

int CommonPrefix::first_split(int window) const { return std::max(split_begin(), first_whole_split(last_position, window)); }

AttentionArgs of_prefix(AttentionArgs args, const CommonPrefix& prefix, std::span<const int32_t> tokens,
                        std::span<const int32_t> positions, const void* q) {
  args.q = q;
  args.tokens = tokens.data();
  args.num_tokens = static_cast<int>(tokens.size());
  args.positions = positions.data();
  args.prefix_end = prefix.end;
  args.prefix = {};
  args.visible_until = nullptr;  // all tokens see all of the prefix
  return args;
}

int64_t CommonPrefixes::find(std::span<const Member> members, int num_tasks, int64_t room) {
  prefixes_.clear();
  tokens_.clear();
  places_.clear();
  units_.clear();
  sort(members);
  choose_runs();
  if (saved_.back() < min_saved_) return 0;
  places_.resize(num_tasks);
  int64_t used = 0;
  for (size_t end = members_.size(); end > 0; end -= run_[end]) add(end - run_[end], end, used, room);
  std::sort(units_.begin(), units_.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
  return used;
}

void CommonPrefixes::sort(std::span<const Member> members) {
  int last = 0;
  for (const Member& member : members) last = std::max(last, member.last_position());
  first_tile_ = first_whole_split(last, window_) * kSplitTiles;
  members_.clear();
  for (const Member& member : members) {
    if (member.tiles() > first_tile_) members_.push_back(member);
  }
  const auto blocks = [&](const Member& member) { return member.blocks + first_tile_ * kTileBlocks; };
  const auto count = [&](const Member& a, const Member& b) {
    return (std::min(a.tiles(), b.tiles()) - first_tile_) * kTileBlocks;
  };
  std::sort(members_.begin(), members_.end(), [&](const Member& a, const Member& b) {
    // Any order will do, so compare bytes.
    const int order = std::memcmp(blocks(a), blocks(b), count(a, b) * sizeof(int32_t));
    return order ? order < 0 : a.tiles() < b.tiles();
  });
  common_.assign(members_.size(), 0);
  for (size_t i = 1; i < members_.size(); ++i) {
    const int32_t* const begin = blocks(members_[i]);
    const int32_t* const end = begin + count(members_[i], members_[i - 1]);
    common_[i] = static_cast<int>(std::mismatch(begin, end, blocks(members_[i - 1])).first - begin) / kTileBlocks;
  }
}

void CommonPrefixes::choose_runs() {
  saved_.assign(members_.size() + 1, 0);
  run_.assign(members_.size() + 1, 1);
  for (size_t end = 1; end <= members_.size(); ++end) {
    saved_[end] = saved_[end - 1];
    int tokens = members_[end - 1].num_tokens, common = members_[end - 1].tiles();
    for (size_t begin = end - 1; begin > 0; --begin) {
      common = std::min(common, common_[begin]);
      tokens += members_[begin - 1].num_tokens;
      if (common == 0 || tokens > max_tokens_) break;
      const int64_t saved = saved_[begin - 1] + static_cast<int64_t>(end - begin) * common;
      if (saved > saved_[end]) saved_[end] = saved, run_[end] = static_cast<int>(end - begin + 1);
    }
  }
}

void CommonPrefixes::add(size_t begin, size_t end, int64_t& used, int64_t room) {
  if (end - begin < 2) return;
  const int common = *std::min_element(common_.begin() + begin + 1, common_.begin() + end);
  CommonPrefix prefix{};
  prefix.task = members_[begin].task;
  prefix.token_begin = static_cast<int>(tokens_.size());
  prefix.begin = first_tile_ * kAttentionTile;
  prefix.end = prefix.begin + common * kAttentionTile;
  prefix.partials = used;
  for (size_t i = begin; i < end; ++i) {
    prefix.num_tokens += members_[i].num_tokens;
    prefix.last_position = std::max(prefix.last_position, members_[i].last_position());
  }
  const int64_t floats = floats_per_token_ * prefix.num_tokens;
  const int splits = static_cast<int>(std::min<int64_t>(prefix.split_end() - prefix.split_begin(), (room - used) / floats));
  if (splits == 0) return;
  prefix.end = std::min(prefix.end, prefix.begin + splits * kKvSplit);
  used += splits * floats;
  const int index = static_cast<int>(prefixes_.size());
  for (size_t i = begin; i < end; ++i) {
    places_[members_[i].task] = {index, static_cast<int>(tokens_.size()) - prefix.token_begin};
    for (int t = 0; t < members_[i].num_tokens; ++t) tokens_.push_back(members_[i].token_begin + t);
  }
  for (int split = prefix.split_begin(); split < prefix.split_end(); ++split) {
    const int64_t seen = std::min(prefix.end - split * kKvSplit, kKvSplit);
    units_.push_back({index, split, seen * prefix.num_tokens});
  }
  prefixes_.push_back(prefix);
}

}  // namespace tidewheel
