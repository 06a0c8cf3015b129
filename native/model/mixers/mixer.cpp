#include "model/mixers/mixer.h"

#include "model/mixers/attention.h"
#include "model/mixers/mlp.h"
#include "model/mixers/parallel.h"

namespace tidewheel {
namespace {

template <typename Plan>
struct MixerOf;
template <>
struct MixerOf<AttentionPlan> {
  using Type = Attention;
};
template <>
struct MixerOf<MlpPlan> {
  using Type = Mlp;
};
template <>
struct MixerOf<ParallelPlan> {
  using Type = Parallel;
};

}  // namespace

std::unique_ptr<const Mixer> make_mixer(const MixerPlan& plan, const std::string& prefix, Context& context) {
  const auto make = [&]<typename Plan>(const Plan& of) -> std::unique_ptr<const Mixer> {
    return std::make_unique<typename MixerOf<Plan>::Type>(of, prefix, context);
  };
  return std::visit(make, plan);
}

}  // namespace tidewheel
