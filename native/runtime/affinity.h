// Threads and the processors they run on, as the operating system has it.
#pragma once

#include <vector>

namespace tidewheel {

// Processors are numbered from 0 to below this.
constexpr int kMostCpus = 1024;

// The processors that this process may use, ascending; never empty.
std::vector<int> affinity();

// Keeps the calling thread on one of them. Where that is refused, or there is no such thing, it costs speed only.
void pin_to(int cpu);

}  // namespace tidewheel
