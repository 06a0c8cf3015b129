#include <doctest/doctest.h>

#include <vector>

#include "model/hidden_rows.h"

using namespace tidewheel;

namespace {

// One sequence's tokens in a step: positions [first, end) of a context in these blocks.
struct Tokens {
  std::vector<int32_t> blocks;
  int first, end;
};

class OneStep {
 public:
  explicit OneStep(const std::vector<Tokens>& sequences) {
    for (const Tokens& tokens : sequences) {
      for (int p = tokens.first; p < tokens.end; ++p) positions_.push_back(p);
      start_.push_back(static_cast<int32_t>(positions_.size()));
      context_.push_back(tokens.end);
      for (int i = 0; i < kTable; ++i) tables_.push_back(i < int(tokens.blocks.size()) ? tokens.blocks[i] : 0);
    }
    step_.positions = positions_, step_.query_start = start_, step_.context_len = context_;
    step_.block_tables = {{tables_.data(), kTable}};
  }

  const Step& operator*() const { return step_; }

 private:
  static constexpr int kTable = 4;
  std::vector<int32_t> positions_, start_ = {0}, context_, tables_;
  Step step_;
};

// Runs a step: each kept row gets `value` plus its position.
void run(HiddenRows& rows, const std::vector<Tokens>& sequences, float value) {
  const OneStep step(sequences);
  rows.begin(*step);
  for (const auto& [token, row] : rows.kept()) row[0] = value + static_cast<float>((*step).positions[token]);
}

// What is found before a sequence's first token; -1: nothing.
float before(const HiddenRows& rows, const Tokens& tokens) {
  const OneStep step({tokens});
  const float* row = rows.before(*step, 0);
  return row ? row[0] : -1;
}

}  // namespace

TEST_CASE("a sequence finds the rows of its last tokens, and no others") {
  HiddenRows rows;
  rows.allocate(2, 3, 4);
  run(rows, {{{5, 6}, 0, 18}, {{7}, 0, 1}}, 100);
  CHECK(before(rows, {{5, 6}, 18, 19}) == 117);
  CHECK(before(rows, {{5, 6}, 17, 19}) == 116);
  CHECK(before(rows, {{5, 6}, 16, 19}) == 115);  // in the block before
  CHECK(before(rows, {{5, 6}, 15, 19}) == -1);
  CHECK(before(rows, {{7}, 1, 2}) == 100);
  CHECK(before(rows, {{7}, 0, 2}) == -1);  // it begins
  // The block is at another place of a longer sequence.
  CHECK(before(rows, {{1, 7}, 17, 18}) == -1);
  run(rows, {{{5, 6}, 17, 18}}, 200);  // behind a draft token that was rejected
  CHECK(before(rows, {{5, 6}, 18, 19}) == 217);
  CHECK(before(rows, {{5, 6}, 17, 19}) == -1);
  CHECK(before(rows, {{7}, 1, 2}) == 100);
}

TEST_CASE("whoever ran the longest time ago makes room") {
  HiddenRows rows;
  rows.allocate(2, 2, 1);
  run(rows, {{{1}, 0, 3}}, 100);
  run(rows, {{{2}, 0, 3}}, 200);
  run(rows, {{{1}, 3, 4}}, 300);
  run(rows, {{{3}, 0, 3}}, 400);
  CHECK(before(rows, {{1}, 4, 5}) == 303);
  CHECK(before(rows, {{2}, 3, 4}) == -1);
  CHECK(before(rows, {{3}, 3, 4}) == 402);
  run(rows, {{{4}, 0, 1}, {{5}, 0, 1}, {{6}, 0, 1}}, 500);  // more than there is room for
  CHECK(rows.kept().size() == 2);
}

TEST_CASE("forks find the rows in the blocks that they share or were copied") {
  HiddenRows rows;
  rows.allocate(3, 2, 1);
  run(rows, {{{1, 2}, 0, 20}}, 100);
  const std::vector<int32_t> pairs = {2, 3};
  rows.copy_blocks(pairs);
  CHECK(before(rows, {{1, 2}, 20, 21}) == 119);
  CHECK(before(rows, {{1, 3}, 20, 21}) == 119);
  run(rows, {{{1, 2}, 20, 21}, {{1, 3}, 20, 21}}, 200);  // both read what was there, and have their own from now on
  CHECK(before(rows, {{1, 2}, 21, 22}) == 220);
  CHECK(before(rows, {{1, 3}, 21, 22}) == 220);
  run(rows, {{{1, 3}, 21, 22}}, 300);
  CHECK(before(rows, {{1, 2}, 21, 22}) == 220);
  CHECK(before(rows, {{1, 3}, 22, 23}) == 321);
}
