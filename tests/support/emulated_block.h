// A block's threads as fibers of one host thread. A fiber runs until it has to wait for others: at a barrier of the block,
// or in an instruction that the lanes of a warp execute together. Which one goes on is a matter of the launch's seed. What
// nobody wrote, in shared memory and around it, is 0xff in every byte: a NaN, or -1.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

// What `emulated.cc` compiles once for all kernels: functions, and instances of templates.
#ifdef EMULATED_ONCE
#define ONCE
#define ONCE_TEMPLATE template
#else
#define ONCE extern inline __attribute__((gnu_inline))
#define ONCE_TEMPLATE extern template
#endif

namespace emulated {

struct Dim { unsigned x = 1, y = 1, z = 1; };

struct Copy {  // to shared memory, on its way
  unsigned to, bytes;
  const void* from;
  long group;
};

// What the last lane to come does for all; a lane that has ended has no payload.
using All = void (*)(void* const* payloads);

enum class State { READY, AT_WARP, AT_BLOCK, ENDED };

constexpr int MOST_THREADS = 1024, MOST_COPIES = 256;
constexpr size_t STACK = 128 << 10;

struct Thread {
  Dim index;
  State state;
  bool started;
  jmp_buf at;
  ucontext_t begin;
  void* payload;
  All all;
  const char* what;
  Copy copies[MOST_COPIES];
  long first_copy, waited_copy, last_copy, groups;
};

struct Warp { int waiting, alive; };

inline Thread threads[MOST_THREADS];
inline Warp warps[MOST_THREADS / 32];
inline Thread* self;
inline int order[MOST_THREADS], place_of[MOST_THREADS];
inline int waiting, alive, count;
inline Dim block, blocks, shape;
inline void (*body)();
inline jmp_buf home;
inline char message[1024];
inline uint64_t dice;
inline bool shuffling;

// Dynamic shared memory: as aligned as it says and no more, with guards around it.
constexpr size_t LARGEST = 227 << 10, GUARD = 4096;
inline unsigned char* const arena =
    static_cast<unsigned char*>(mmap(nullptr, LARGEST + 4 * GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
inline size_t memory_start, memory_size, static_size;
struct Variable { void* at; size_t size; };
inline Variable variables[16];
inline int known_variables;
constexpr int MOST_ARRAYS = 32;
struct Range { const unsigned char *from, *to; const char* name; };
inline Range arrays[MOST_ARRAYS];
inline int known_arrays;

[[noreturn]] ONCE void fail(const char* format, ...) {
  char why[600];
  va_list rest;
  va_start(rest, format);
  vsnprintf(why, sizeof why, format, rest);
  va_end(rest);
  const long at = self ? self - threads : -1;
  snprintf(message, sizeof message, "%s (block %u, %u; thread %ld)", why, block.x, block.y, at);
  _longjmp(home, 2);
}

inline uint64_t rolled() {  // splitmix64
  uint64_t z = dice += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

ONCE void shuffle(int* some, int size) {
  for (int i = size - 1; i > 0; --i) {
    const int other = rolled() % (i + 1), kept = some[i];
    some[i] = some[other];
    some[other] = kept;
  }
}

[[noreturn]] ONCE void deadlock() {
  int at_block = 0, at_warp = 0;
  const char* what = "";
  for (int i = 0; i < count; ++i) {
    at_block += threads[i].state == State::AT_BLOCK;
    if (threads[i].state == State::AT_WARP) ++at_warp, what = threads[i].what;
  }
  fail("nobody can go on: %d threads wait in __syncthreads, %d for their warp %s%s", at_block, at_warp, at_warp ? "in " : "", what);
}

[[gnu::noinline]] ONCE void go_to(Thread* next) {
  if (next == self || _setjmp(self->at)) return;
  self = next;
  if (next->started) _longjmp(next->at, 1);
  next->started = true;
  setcontext(&next->begin);
}

ONCE Thread* next_ready() {  // of the same warp if possible; at times any, where the order is shuffled
  const int here = shuffling && rolled() % 16 == 0 ? rolled() % count : place_of[self - threads], first = here / 32 * 32;
  for (int i = 1; i <= 32; ++i) {
    const int place = first + (here - first + i) % 32;
    if (place < count && threads[order[place]].state == State::READY) return threads + order[place];
  }
  for (int i = 1; i < count; ++i) {
    const int place = (here + i) % count;
    if (threads[order[place]].state == State::READY) return threads + order[place];
  }
  return nullptr;
}

ONCE void wait() {
  while (self->state != State::READY) {
    Thread* next = next_ready();
    if (!next) deadlock();
    go_to(next);
  }
}

ONCE void meet_in_warp(int warp) {  // once all of it are there
  Warp& own = warps[warp];
  if (!own.waiting || own.waiting < own.alive) return;
  void* payloads[32] = {};
  const Thread* any = nullptr;
  for (int i = 0; i < 32 && warp * 32 + i < count; ++i) {
    Thread& one = threads[warp * 32 + i];
    if (one.state == State::ENDED) continue;
    if (any && any->all != one.all) fail("lanes of warp %d meet in %s and in %s", warp, any->what, one.what);
    any = &one;
    payloads[i] = one.payload;
  }
  any->all(payloads);
  for (int i = 0; i < 32 && warp * 32 + i < count; ++i)
    if (threads[warp * 32 + i].state == State::AT_WARP) threads[warp * 32 + i].state = State::READY;
  own.waiting = 0;
}

ONCE void meet_in_block() {
  if (!waiting || waiting < alive) return;
  for (int i = 0; i < count; ++i)
    if (threads[i].state == State::AT_BLOCK) threads[i].state = State::READY;
  waiting = 0;
}

// An instruction of the whole warp.
ONCE void together(const char* what, void* payload, All all) {
  const int warp = (self - threads) / 32;
  self->what = what;
  self->payload = payload;
  self->all = all;
  self->state = State::AT_WARP;
  ++warps[warp].waiting;
  meet_in_warp(warp);
  wait();
}

// What was waited for is there for all with the barrier after that. (CUDA: for the thread itself at once.)
ONCE void arrive() {
  for (; self->first_copy < self->waited_copy; ++self->first_copy) {
    const Copy& copy = self->copies[self->first_copy % MOST_COPIES];
    memset(arena + copy.to, 0, 16);
    memcpy(arena + copy.to, copy.from, copy.bytes);
  }
}

ONCE void sync_block() {
  arrive();
  self->state = State::AT_BLOCK;
  ++waiting;
  meet_in_block();
  wait();
}

ONCE void live() {  // a fiber's life, block after block
  for (;;) {
    body();
    const int warp = (self - threads) / 32;
    self->state = State::ENDED;
    --alive;
    --warps[warp].alive;
    meet_in_warp(warp);
    meet_in_block();
    if (!alive) {
      if (!_setjmp(self->at)) _longjmp(home, 1);
    } else if (Thread* next = next_ready()) {
      go_to(next);
    } else {
      deadlock();
    }
  }
}

inline unsigned char* dynamic(size_t alignment) {
  memory_start = GUARD + alignment;
  if (memory_start + memory_size > LARGEST + 2 * GUARD) fail("%zu bytes of shared memory", memory_size);
  return arena + memory_start;
}

ONCE void variable(void* at, size_t size) {  // of shared memory: garbage where a block first comes to it
  for (int i = 0; i < known_variables; ++i)
    if (variables[i].at == at) return;
  if (known_variables == 16) fail("too many variables in shared memory");
  variables[known_variables++] = {at, size};
  static_size += size;
  if (static_size > 48 << 10 || static_size + memory_size > LARGEST)
    fail("%zu fixed bytes of shared memory beside %zu", static_size, memory_size);
  memset(at, 0xff, size);
}

ONCE void check_guards() {
  if (!memory_start) return;
  for (size_t i = 0; i < GUARD; ++i) {
    if (arena[memory_start - 1 - i] != 0xff) fail("something was written %zu bytes before shared memory", i + 1);
    if (arena[memory_start + memory_size + i] != 0xff) fail("something was written %zu bytes behind shared memory", i);
  }
}

ONCE void run_block() {
  memset(arena, 0xff, memory_size + 4 * GUARD);
  memory_start = static_size = 0;
  known_variables = 0;
  alive = count;
  waiting = 0;
  for (int i = 0; i < count; ++i) {
    threads[i].state = State::READY;
    threads[i].first_copy = threads[i].waited_copy = threads[i].last_copy = threads[i].groups = 0;
  }
  for (int i = 0; i < (count + 31) / 32; ++i) warps[i] = {0, count - i * 32 < 32 ? count - i * 32 : 32};
  if (!_setjmp(home)) {
    self = threads + order[0];
    if (self->started) _longjmp(self->at, 1);
    self->started = true;
    setcontext(&self->begin);
  }
}

ONCE void arrange() {  // the order in which threads come to run: warps, and lanes of each
  int turns[MOST_THREADS / 32], lanes[32], at = 0;
  const int whole = count / 32;
  for (int i = 0; i < whole; ++i) turns[i] = i;
  if (shuffling) shuffle(turns, whole);
  for (int i = 0; i < whole; ++i) {
    for (int j = 0; j < 32; ++j) lanes[j] = j;
    if (shuffling) shuffle(lanes, 32);
    for (int j = 0; j < 32; ++j) order[at++] = turns[i] * 32 + lanes[j];
  }
  for (; at < count; ++at) order[at] = at;
  for (int i = 0; i < count; ++i) place_of[order[i]] = i;
}

ONCE void signalled(int number, siginfo_t* signal, void*) {
  if (number == SIGVTALRM) fail("it ran for a minute");
  if (number == SIGFPE) fail("a division by zero");
  const auto* at = static_cast<const unsigned char*>(signal->si_addr);
  for (int i = 0; i < known_arrays; ++i)
    if (at >= arrays[i].to && at < arrays[i].to + 4096)
      fail("an access %td bytes behind the end of %s", at - arrays[i].to, arrays[i].name);
  fail("an access to no memory, at %p", at);
}

struct Signals {  // for as long as it lives
  static constexpr int NUMBERS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
  struct sigaction before[4];
  Signals() {
    struct sigaction action = {};
    action.sa_sigaction = signalled;
    action.sa_flags = SA_NODEFER | SA_SIGINFO;
    for (int i = 0; i < 4; ++i) sigaction(NUMBERS[i], &action, before + i);
    limit(60);
  }
  ~Signals() {
    limit(0);
    for (int i = 0; i < 4; ++i) sigaction(NUMBERS[i], before + i, nullptr);
  }
  static void limit(long seconds) {
    const itimerval timer = {{0, 0}, {seconds, 0}};
    setitimer(ITIMER_VIRTUAL, &timer, nullptr);
  }
};

ONCE void begin_threads(unsigned size) {
  static unsigned char* stacks = nullptr;
  if (!stacks)
    stacks = static_cast<unsigned char*>(mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  count = size;
  for (int i = 0; i < count; ++i) {
    Thread& one = threads[i];
    one.index = {unsigned(i), 0, 0};
    one.started = false;
    getcontext(&one.begin);
    one.begin.uc_stack.ss_sp = stacks + i * STACK;
    one.begin.uc_stack.ss_size = STACK;
    one.begin.uc_link = nullptr;
    makecontext(&one.begin, live, 0);
  }
}

// Runs all blocks, one after the other: in their order, or in one that the seed says. What went wrong, or null.
ONCE const char* launch(void (*kernel)(), unsigned width, unsigned height, unsigned size, size_t shared, unsigned seed) {
  if (size > MOST_THREADS || shared > LARGEST) return "a block is too large";
  const Signals signals;
  self = nullptr;
  message[0] = 0;
  body = kernel;
  blocks = {width, height, 1};
  shape = {size, 1, 1};
  memory_size = shared;
  dice = seed;
  shuffling = seed != 0;
  begin_threads(size);
  const int all = width * height;
  int* const turns = static_cast<int*>(malloc(all * sizeof(int)));
  for (int i = 0; i < all; ++i) turns[i] = i;
  if (shuffling) shuffle(turns, all);
  // `at` is kept in memory, as jumps come back here.
  for (volatile int at = 0; at < all && !message[0]; at = at + 1) {
    block = {turns[at] % width, turns[at] / width, 0};
    arrange();
    run_block();
    self = nullptr;
    if (!message[0] && !_setjmp(home)) check_guards();
  }
  free(turns);
  return message[0] ? message : nullptr;
}

}  // namespace emulated
