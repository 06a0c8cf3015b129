#include <doctest/doctest.h>

#include <cmath>
#include <deque>

#include "model/tower.h"
#include "support.h"
#include "tensors.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

constexpr int kHidden = 40, kInputs = 30, kOutputs = 50;

TowerPlan tower_plan(bool with_mlp) {
  AttentionPlan attention;
  attention.num_heads = 4, attention.num_kv_heads = 2, attention.head_dim = 20;
  attention.scale = 0.25f;
  attention.rope = RopePlan{{1.0f, 0.5f, 0.2f}};
  attention.rope->axes = {0, 1, 0};
  attention.two_way = true;
  const NormPlan norm{NormKind::kLayer, 1e-5f, true};
  TowerPlan plan;
  plan.hidden_size = kHidden;
  plan.layers = {{{attention, norm, {}, {}}}};
  if (with_mlp) plan.layers[0].push_back({MlpPlan{56, Activation::kGeluQuick, false, true}, norm, {}, {}});
  plan.projections = {{"merge", {kInputs, kOutputs, true, norm, true, Activation::kGeluQuick}}};
  plan.cross_attentions = {{"resampler", {2, 20, 0.25f}}};
  return plan;
}

struct SmallTower {
  std::map<std::string, std::vector<float>> weights;
  std::unique_ptr<Tower> tower;

  SmallTower(const Kernels& kernels, bool with_mlp, DType type = DType::kFloat32, const std::vector<std::vector<int>>& groups = {{0}}) {
    TowerPlan plan = tower_plan(with_mlp);
    Shapes shapes;
    for (const ResidualBlockPlan& residual : plan.layers[0]) add_residual(shapes, "layers.0.", residual, kHidden);
    add_linear(shapes, "merge", kOutputs, kInputs, true);
    add_norm(shapes, "merge.norm", plan.projections.at("merge").norm, kInputs);
    Random random;
    std::vector<Source> sources;
    for (const auto& [name, shape] : shapes) {
      const bool matrix = shape.size() > 1;
      weights[name] = random.normals(shape[0] * (matrix ? shape[1] : 1), matrix ? 0.3f : 1.0f);
      sources.push_back({name, weights[name].data(), DType::kFloat32, shape,
                         matrix ? std::vector<int64_t>{shape[1], 1} : std::vector<int64_t>{1}});
      if (matrix) plan.formats[name] = {type == DType::kFloat32 ? WeightKind::kFloat32 : WeightKind::kBFloat16};
    }
    const CacheType cache = type == DType::kFloat32 ? CacheType::kFloat32 : CacheType::kBFloat16;
    tower = std::make_unique<Tower>(plan, kernels, cache, TowerShape{640, 128}, std::make_shared<ThreadPool>(groups));
    tower->set_weights(sources);
    tower->check_complete();
  }

  // The layer of one segment, a piece after the other.
  std::vector<float> run(std::vector<float> rows, const std::vector<int32_t>& positions, int piece_rows) {
    const int count = static_cast<int>(rows.size()) / kHidden;
    const std::vector<int32_t> lengths = {count};
    const auto each_piece = [&](auto&& body) {
      for (int begin = 0; begin < count; begin += piece_rows) {
        const int end = std::min(begin + piece_rows, count);
        const std::vector<int32_t> start = {0, end - begin};
        std::vector<int32_t> here(positions.begin() + begin, positions.begin() + end);
        here.insert(here.end(), positions.begin() + count + begin, positions.begin() + count + end);
        body(TowerPiece{start, lengths, begin, here}, std::span(rows).subspan(begin * kHidden, (end - begin) * kHidden));
      }
    };
    if (piece_rows >= count) {
      each_piece([&](const TowerPiece& piece, std::span<float> part) { tower->run(0, 1, piece, part); });
    } else {
      each_piece([&](const TowerPiece& piece, std::span<float> part) { tower->remember(0, piece, part); });
      each_piece([&](const TowerPiece& piece, std::span<float> part) { tower->finish(0, piece, part); });
    }
    return rows;
  }
};

// Rows and columns, one behind the other.
std::vector<int32_t> places(int count) {
  std::vector<int32_t> positions;
  for (int i = 0; i < count; ++i) positions.push_back(i / 7);
  for (int i = 0; i < count; ++i) positions.push_back(i % 7);
  return positions;
}

std::vector<double> normed(const SmallTower& small, const std::string& name, const float* x, int size) {
  double mean = 0, square = 0;
  for (int i = 0; i < size; ++i) mean += x[i] / size;
  for (int i = 0; i < size; ++i) square += (x[i] - mean) * (x[i] - mean) / size;
  std::vector<double> y(size);
  for (int i = 0; i < size; ++i) {
    y[i] = (x[i] - mean) / std::sqrt(square + 1e-5) * small.weights.at(name + ".weight")[i] + small.weights.at(name + ".bias")[i];
  }
  return y;
}

std::vector<double> product(const SmallTower& small, const std::string& name, const std::vector<double>& x, int outputs) {
  const std::vector<float>& weight = small.weights.at(name);
  std::vector<double> y(outputs);
  for (int o = 0; o < outputs; ++o) {
    for (size_t i = 0; i < x.size(); ++i) y[o] += x[i] * weight[o * x.size() + i];
  }
  return y;
}

void turn(std::vector<double>& heads, int row, int column) {
  const double frequencies[] = {1.0, 0.5, 0.2};
  for (size_t head = 0; head < heads.size(); head += 20) {
    for (int i = 0; i < 3; ++i) {
      const double angle = (i == 1 ? column : row) * frequencies[i], a = heads[head + i], b = heads[head + i + 3];
      heads[head + i] = a * std::cos(angle) - b * std::sin(angle);
      heads[head + i + 3] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
}

// x + attention(norm(x)), where all rows see each other.
std::vector<double> plain_layer(const SmallTower& small, const std::vector<float>& rows, const std::vector<int32_t>& positions) {
  const int count = static_cast<int>(rows.size()) / kHidden;
  std::vector<std::vector<double>> q, k, v;
  for (int row = 0; row < count; ++row) {
    const auto x = normed(small, "layers.0.attention_norm", rows.data() + row * kHidden, kHidden);
    q.push_back(product(small, "layers.0.q.weight", x, 80)), k.push_back(product(small, "layers.0.k.weight", x, 40));
    v.push_back(product(small, "layers.0.v.weight", x, 40));
    turn(q[row], positions[row], positions[count + row]), turn(k[row], positions[row], positions[count + row]);
  }
  std::vector<double> result;
  for (int row = 0; row < count; ++row) {
    std::vector<double> mixed(80);
    for (int head = 0; head < 4; ++head) {
      double total = 0;
      std::vector<double> sums(20);
      for (int other = 0; other < count; ++other) {
        double score = 0;
        for (int d = 0; d < 20; ++d) score += q[row][head * 20 + d] * k[other][head / 2 * 20 + d];
        const double weight = std::exp(0.25 * score);
        total += weight;
        for (int d = 0; d < 20; ++d) sums[d] += weight * v[other][head / 2 * 20 + d];
      }
      for (int d = 0; d < 20; ++d) mixed[head * 20 + d] = sums[d] / total;
    }
    const auto added = product(small, "layers.0.o.weight", mixed, kHidden);
    for (int i = 0; i < kHidden; ++i) result.push_back(rows[row * kHidden + i] + added[i]);
  }
  return result;
}

}  // namespace

TEST_CASE("a tower's rows see all of their segment") {
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(kernels->name);
    SmallTower small(*kernels, false);
    Random random;
    for (const int count : {1, 33, 120}) {
      const std::vector<float> rows = random.normals(count * kHidden);
      const auto expected = plain_layer(small, rows, places(count));
      const auto found = small.run(rows, places(count), 128);
      for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == doctest::Approx(expected[i]).epsilon(1e-4).scale(1.0));
    }
  }
}

TEST_CASE("a tower's projection") {
  Random random;
  const int count = 5;
  const std::vector<float> rows = random.normals(count * kInputs);
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(kernels->name);
    SmallTower small(*kernels, false);
    std::vector<float> found(count * kOutputs);
    small.tower->project("merge", rows, found);
    for (int row = 0; row < count; ++row) {
      const auto y = product(small, "merge.weight", normed(small, "merge.norm", rows.data() + row * kInputs, kInputs), kOutputs);
      for (int i = 0; i < kOutputs; ++i) {
        const double x = y[i] + small.weights.at("merge.bias")[i];
        CHECK(found[row * kOutputs + i] == doctest::Approx(x / (1 + std::exp(-1.702 * x))).epsilon(1e-4).scale(1.0));
      }
    }
  }
}

TEST_CASE("neither pieces nor groups change a bit of a tower's layer") {
  Random random;
  const int longest = 600;  // longer than a KV split
  const std::vector<float> rows = random.normals(longest * kHidden);
  for (const Kernels* kernels : tested_kernels()) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      if (kStride != 1 && type != DType::kBFloat16) continue;
      CAPTURE(kernels->name);
      SmallTower small(*kernels, true, type);
      const std::vector<float> few(rows.begin(), rows.begin() + 100 * kHidden);
      const auto whole = small.run(few, places(100), 128), in_pieces = small.run(rows, places(longest), 128);
      for (const int piece_rows : {1, 31}) CHECK(small.run(few, places(100), piece_rows) == whole);
      CHECK(small.run(rows, places(longest), 77) == in_pieces);
      SmallTower shared(*kernels, true, type, {{0}, {0, 1}});
      CHECK(shared.run(few, places(100), 128) == whole);
      CHECK(shared.run(rows, places(longest), 128) == in_pieces);
    }
  }
}

TEST_CASE("queries see all keys, in pieces of any size") {
  static constexpr int kQueries = 50, kKeys = 37, kWidth = 40;
  Random random;
  const std::vector<float> q = random.normals(kQueries * 3 * kWidth), kv = random.normals(kKeys * 3 * kWidth);
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(kernels->name);
    SmallTower small(*kernels, false, DType::kFloat32, {{0}, {0, 1}});
    const auto attended = [&](int keys_at_once, int queries_at_once) {
      std::vector<float> out(kQueries * kWidth);
      const auto part = [](const std::vector<float>& rows, int first, int count) {
        return std::span(rows).subspan(first * 3 * kWidth, count * 3 * kWidth);
      };
      for (int i = 0; i < kKeys; i += keys_at_once) {
        small.tower->remember_keys("resampler", kKeys, i, part(kv, i, std::min(keys_at_once, kKeys - i)));
      }
      for (int i = 0; i < kQueries; i += queries_at_once) {
        const int count = std::min(queries_at_once, kQueries - i);
        small.tower->attend("resampler", kKeys, part(q, i, count), std::span(out).subspan(i * kWidth, count * kWidth));
      }
      return out;
    };
    const std::vector<float> whole = attended(kKeys, kQueries);
    CHECK(attended(5, 1) == whole);
    for (int query = 0; query < kQueries; ++query) {
      for (int head = 0; head < 2; ++head) {
        std::vector<double> expected(20);
        double total = 0;
        for (int key = 0; key < kKeys; ++key) {
          double score = 0;
          for (int i = 0; i < 20; ++i) score += double{q[query * 120 + head * 20 + i]} * kv[key * 120 + 40 + head * 20 + i];
          const double weight = std::exp(score * 0.25);
          total += weight;
          for (int i = 0; i < 20; ++i) expected[i] += weight * kv[key * 120 + 80 + head * 20 + i];
        }
        for (int i = 0; i < 20; ++i) CHECK(whole[query * kWidth + head * 20 + i] == doctest::Approx(expected[i] / total).epsilon(1e-4));
      }
    }
    CHECK_THROWS_WITH(small.tower->attend("other", 1, q, {}), doctest::Contains("no cross attention"));
    CHECK_THROWS_WITH(small.tower->remember_keys("resampler", 641, 0, kv), doctest::Contains("there is room"));
    CHECK_THROWS_WITH(small.tower->remember_keys("resampler", kKeys, 1, kv), doctest::Contains("among all rows"));
    CHECK_THROWS_WITH(small.tower->attend("resampler", kKeys, q, {}), doctest::Contains("as many rows"));
  }
}

TEST_CASE("a tower has attention, MLPs and experts") {
  const std::vector<std::vector<int>> groups = {{0}};
  const auto made = [&](TowerPlan plan) {
    for (const char* name : {"merge", "layers.0.up", "layers.0.down"}) plan.formats[std::string(name) + ".weight"] = {};
    Tower(plan, choose_kernels("auto"), CacheType::kFloat32, {16, 16}, std::make_shared<ThreadPool>(groups));
  };
  TowerPlan plan = tower_plan(true);
  std::get<AttentionPlan>(plan.layers[0][0].mixer).output_gate = true;
  CHECK_THROWS_WITH(made(plan), doctest::Contains("nor an output gate"));
  plan = tower_plan(true);
  std::swap(plan.layers[0][0], plan.layers[0][1]);
  CHECK_THROWS_WITH(made(plan), doctest::Contains("first part"));
  plan = tower_plan(true);
  plan.layers[0][0].mixer = ShortConvPlan{40, 3};
  CHECK_THROWS_WITH(made(plan), doctest::Contains("only attention, MLPs and experts"));
}
