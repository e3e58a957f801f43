// The arrays that a kernel is given: copies of the host's, whose ends are the ends of their pages, so that whoever goes
// beyond meets no memory. Before them is 0xff, and in outputs too.
#pragma once
#include "emulated_block.h"

namespace emulated {

constexpr size_t PAGE = 4096, ALIGNED = 32;  // more than the widest access

enum Use { READ, CHANGED, MADE };

struct Mapping { void* host; size_t size; Use use; unsigned char *pages, *first; size_t paged; };
inline Mapping mappings[MOST_ARRAYS];

ONCE void map(int i, void* host, size_t size, Use use, const char* name) {
  Mapping& own = mappings[i];
  own = {host, size, use, nullptr, nullptr, 0};
  for (int j = 0; j < i; ++j)
    if (mappings[j].pages && mappings[j].host == host && mappings[j].size == size) {  // the same one twice
      own.first = mappings[j].first;
      if (use == CHANGED) mappings[j].use = CHANGED;
    }
  if (!own.first) {
    const size_t room = (size + ALIGNED - 1) / ALIGNED * ALIGNED;
    own.paged = (room + 2 * PAGE - 1) / PAGE * PAGE;  // some before it
    own.pages = static_cast<unsigned char*>(mmap(nullptr, own.paged + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(own.pages + PAGE, own.paged, PROT_READ | PROT_WRITE);
    own.first = own.pages + PAGE + own.paged - room;
    memset(own.pages + PAGE, 0xff, own.paged);
    if (use != MADE) memcpy(own.first, host, size);
  }
  arrays[i] = {own.first, own.first + size, name};
}

// What is wrong with what is beside an array, or in it; null if nothing.
ONCE const char* wrong(const Mapping& own, const char* name) {
  const unsigned char *from = own.pages + PAGE, *to = from + own.paged, *end = own.first + own.size;
  for (const unsigned char* at = own.first; --at >= from;)
    if (*at != 0xff) return snprintf(message, sizeof message, "written %td bytes before %s", own.first - at, name), message;
  for (const unsigned char* at = end; at < to; ++at)
    if (*at != 0xff) return snprintf(message, sizeof message, "written %td bytes behind the end of %s", at - end, name), message;
  if (own.use == READ && memcmp(own.host, own.first, own.size))
    return snprintf(message, sizeof message, "written to %s, which is to be read only", name), message;
  return nullptr;
}

// As `launch`, with arrays of the host.
ONCE const char* launch_with(void* const* hosts, const size_t* sizes, const int* uses, const char* const* names, int count,
                               void (*kernel)(), unsigned width, unsigned height, unsigned size, size_t shared, unsigned seed) {
  if (count > MOST_ARRAYS) return "too many arrays";
  known_arrays = count;
  for (int i = 0; i < count; ++i) map(i, hosts[i], sizes[i], Use(uses[i]), names[i]);
  const char* failure = launch(kernel, width, height, size, shared, seed);
  for (int i = 0; i < count && !failure; ++i)
    if (mappings[i].pages) failure = wrong(mappings[i], names[i]);
  for (int i = 0; i < count; ++i) {
    const Mapping& own = mappings[i];
    if (!own.pages) continue;
    if (own.use != READ) memcpy(own.host, own.first, own.size);
    munmap(own.pages, own.paged + 2 * PAGE);
  }
  return failure;
}

}  // namespace emulated
