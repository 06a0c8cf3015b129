// Page-aligned, zeroed memory with one owner. Physical pages are allocated on first touch, on the NUMA node of the
// touching thread. They are huge pages if the system allows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

namespace tidewheel {

class Arena {
 public:
  Arena() = default;
  explicit Arena(size_t bytes) : bytes_(bytes) {
    if (bytes_ == 0) return;
    // Begin at a huge page boundary. Otherwise the first huge page could be shared with other memory, on another node.
    const size_t spare = bytes_ < kHugePage ? 0 : kHugePage;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), whole = (bytes_ + page - 1) / page * page;
    void* const mapped = mmap(nullptr, whole + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    const size_t skipped = spare ? (kHugePage - reinterpret_cast<uintptr_t>(mapped) % kHugePage) % kHugePage : 0;
    data_ = static_cast<char*>(mapped) + skipped;
    if (skipped) munmap(mapped, skipped);
    if (spare > skipped) munmap(data_ + whole, spare - skipped);
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes_, MADV_HUGEPAGE);  // only a hint: without huge pages everything works, but a little slower
#endif
  }
  Arena(Arena&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Arena& operator=(Arena&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    if (data_) munmap(data_, bytes_);
  }

  // Gives the pages back to the system. What they held is lost: they are zeros when they are touched again.
  void forget() {
    if (!data_) return;
#if defined(__linux__)
    madvise(data_, bytes_, MADV_DONTNEED);
#else  // for other systems that is a hint, after which the pages may keep what they held
    mmap(data_, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#endif
  }

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;

  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tidewheel
