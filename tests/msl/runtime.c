// Runs one Metal kernel, compiled for the CPU, over a grid: one fibre per GPU thread, 32 lanes to a
// simdgroup, collectives and barriers by switching fibres. A single OS thread runs it all.
// With `check` set every load and store (clang's trace-loads and trace-stores) passes through shadow
// memory: accesses out of range, reads of memory never written, data races, stores to inputs.
// Includes no header, so that a bare clang builds it.
typedef _Bool bool;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef __SIZE_TYPE__ size_t;
#define true 1
#define false 0
#define NULL ((void*)0)
#define UINT32_MAX 0xffffffffu

void* calloc(size_t, size_t);
void free(void*);
void* memcpy(void*, const void*, size_t);
void* memset(void*, int, size_t);
void* mmap(void*, size_t, int, int, int, long);

// From the kernel's object: its entry, and its threadgroup arrays.
void msl_entry(const uint64_t* args, const uint32_t* attributes);
extern void* msl_threadgroup_arrays[];
extern const uint64_t msl_threadgroup_sizes[];
extern const uint64_t msl_threadgroup_count;

// ---- the interface to emulator.py ----------------------------------------------------------------
enum Role { SHAPE, INPUT, OUTPUT };
enum Kind {
  OUT_OF_RANGE_LOAD = 1, OUT_OF_RANGE_STORE, WRITE_WRITE, WRITE_AFTER_READ, READ_AFTER_WRITE,
  UNWRITTEN_LOAD, INPUT_STORE, WILD, DIVERGENT_SIMD, DIVERGENT_BARRIER, EARLY_RETURN, TOO_LARGE
};
typedef struct {
  uint32_t kind;
  int32_t buffer, array;        // index of the buffer or threadgroup array, -1: none
  int64_t offset;               // in bytes
  uint32_t group, thread, other;  // other: the second thread of a race
  uint64_t where;               // offset of the instruction in the object, or a source line
} Problem;
typedef struct { uint64_t loaded, stored, touched_loads, touched_stores, unwritten; } Traffic;
typedef struct {
  uint64_t address, bytes;
  uint32_t item, role;
  Traffic traffic;
} Buffer;
enum { MAX_PROBLEMS = 64 };
typedef struct {
  Buffer* buffers;
  uint32_t n_buffers, check, order, seed;  // order 0: forward, 1: reverse, 2: shuffled
  uint32_t grid[3], threads[3];
  uint32_t n_problems;
  Problem problems[MAX_PROBLEMS];
} Launch;

// ---- fibres --------------------------------------------------------------------------------------
#if defined(__x86_64__)
__asm__(
    ".text\n.hidden msl_switch\n.globl msl_switch\n.type msl_switch,@function\nmsl_switch:\n"
    "  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq (%rsi), %rsp\n"
    "  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n  ret\n");
static void* new_fibre(char* top, void (*run)(void)) {
  uint64_t* sp = (uint64_t*)top;
  *--sp = 0;
  *--sp = (uint64_t)run;
  for (int i = 0; i < 6; ++i) *--sp = 0;
  return sp;
}
#elif defined(__aarch64__)
__asm__(
    ".text\n.hidden msl_switch\n.globl msl_switch\nmsl_switch:\n"
    "  sub sp, sp, #176\n"
    "  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]\n"
    "  mov x9, sp; str x9, [x0]; ldr x9, [x1]; mov sp, x9\n"
    "  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #176\n  ret\n");
static void* new_fibre(char* top, void (*run)(void)) {
  char* sp = top - 176;
  memset(sp, 0, 176);
  ((uint64_t*)sp)[11] = (uint64_t)run;
  return sp;
}
#endif
void msl_switch(void** from, void** to);

enum { STACK = 64 << 10, MAX_THREADS = 1024, MAX_THREADGROUP_BYTES = 32768 };
enum State { READY, AT_COLLECTIVE, AT_BARRIER, DONE };
typedef struct {
  void* sp;
  enum State state;
  int op, line, size, flags;
  uint32_t mask;
  _Alignas(16) unsigned char value[16];
  uint32_t attributes[32];
} Lane;
static Lane lanes[MAX_THREADS];
static char* stacks;
static void* scheduler;
static int current = -1;  // the lane that runs
static _Alignas(16) unsigned char gathered[32 * 16];
static uint64_t addresses[32];
static Launch* launch;
static uint32_t group_index, group_threads;
static bool abandoned;

static char* stack_of(int lane) { return stacks + (size_t)lane * STACK; }
static void leave(enum State state) {
  Lane* lane = &lanes[current];
  lane->state = state;
  msl_switch(&lane->sp, &scheduler);
}
static void enter(int lane) {
  current = lane;
  msl_switch(&scheduler, &lanes[lane].sp);
  current = -1;
}
static void lane_main(void) {
  msl_entry(addresses, lanes[current].attributes);
  leave(DONE);
}
static Problem* report(enum Kind kind, int buffer, int array, int64_t offset, uint64_t where) {
  static Problem spare;
  for (uint32_t i = 0; i < launch->n_problems; ++i) {
    Problem* p = &launch->problems[i];
    if (p->kind == kind && p->where == where && p->buffer == buffer && p->array == array)
      return &spare;
  }
  if (launch->n_problems == MAX_PROBLEMS) return &spare;
  Problem* p = &launch->problems[launch->n_problems++];
  *p = (Problem){kind, buffer, array, offset, group_index, current < 0 ? 0 : current, 0, where};
  return p;
}

// ---- what metal_stdlib calls ---------------------------------------------------------------------
const void* msl_gather(const void* value, int size, int op, int line, uint32_t* mask) {
  Lane* lane = &lanes[current];
  if (size) memcpy(lane->value, value, size);
  lane->size = size, lane->op = op, lane->line = line;
  leave(AT_COLLECTIVE);
  *mask = lane->mask;
  return gathered;
}
void msl_barrier(int flags, int line) {
  lanes[current].flags = flags, lanes[current].line = line;
  leave(AT_BARRIER);
}
uint32_t msl_lane(void) { return current & 31; }
// float to bfloat16, to nearest even: clang calls this, and not every compiler's library has it
__attribute__((weak)) __bf16 __truncsfbf2(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t nan = (u & 0x7fffffff) > 0x7f800000;
  uint16_t r = nan ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  __bf16 b;
  memcpy(&b, &r, 2);
  return b;
}

// ---- the checker ---------------------------------------------------------------------------------
enum { MANY = UINT32_MAX, SIMD_BARRIER = 100, THREADGROUP_MEMORY = 2, DEVICE_MEMORY = 1 };
typedef struct { uint32_t barriers, simd_barriers; } Time;
typedef struct {  // of one buffer element or threadgroup byte; threads count from 1 over the grid
  uint32_t writer, reader;
  Time written, read;
  bool was_read, was_written;
} Shadow;
typedef struct {
  uintptr_t low, high;
  int buffer, array;
  uint32_t grain;
  size_t size;
  Shadow* shadow;
} Region;
static Region regions[64];
static int n_regions;
static uint32_t barriers[2];           // since the launch: that order device, threadgroup memory
static uint32_t simd_barriers[MAX_THREADS / 32];
__attribute__((visibility("hidden"))) extern char __ehdr_start[], _end[];  // this object

static bool ordered(uint32_t other, Time then, const Region* r, uint32_t me, Time now) {
  if (other == me) return true;
  if (other == MANY) return then.barriers != now.barriers;
  if ((other - 1) / group_threads != group_index) return false;
  if (then.barriers != now.barriers) return true;
  bool same_simdgroup = (other - 1) % group_threads / 32 == (uint32_t)current / 32;
  return same_simdgroup && then.simd_barriers != now.simd_barriers;
}
static void touch(Region* r, size_t at, bool store, uint64_t where) {
  Shadow* s = &r->shadow[at];
  bool local = r->array >= 0;
  Time now = {barriers[local], simd_barriers[current / 32]};
  uint32_t me = group_index * group_threads + current + 1;
  int64_t offset = (int64_t)(at * r->grain);
  if (s->writer && !ordered(s->writer, s->written, r, me, now))
    report(store ? WRITE_WRITE : READ_AFTER_WRITE, r->buffer, r->array, offset, where)->other =
        (s->writer - 1) % group_threads;
  if (store) {
    if (s->reader && !ordered(s->reader, s->read, r, me, now))
      report(WRITE_AFTER_READ, r->buffer, r->array, offset, where)->other =
          s->reader == MANY ? MANY : (s->reader - 1) % group_threads;
    s->writer = me, s->written = now, s->was_written = true;
  } else {
    if (!s->was_written) report(UNWRITTEN_LOAD, r->buffer, r->array, offset, where);
    bool shared = s->reader && s->reader != me && s->read.barriers == now.barriers;
    s->reader = shared ? MANY : me, s->read = now, s->was_read = true;
  }
}
static void access(uintptr_t p, size_t n, bool store, void* pc) {
  if (!launch->check || current < 0) return;
  uintptr_t stack = (uintptr_t)stack_of(current);
  if (p >= stack && p < stack + STACK) return;
  uint64_t where = (uintptr_t)pc - (uintptr_t)__ehdr_start - 1;
  for (int i = 0; i < n_regions; ++i) {
    Region* r = &regions[i];
    uintptr_t gap = r->array >= 0 ? 256 : 1 << 20;
    if (p + gap < r->low || p >= r->high + gap) continue;
    int64_t offset = (int64_t)(p - r->low);
    if (p < r->low || p + n > r->high) {
      report(store ? OUT_OF_RANGE_STORE : OUT_OF_RANGE_LOAD, r->buffer, r->array, offset, where);
      return;
    }
    enum Role role = r->array >= 0 ? OUTPUT : launch->buffers[r->buffer].role;
    if (r->buffer >= 0) {
      Traffic* t = &launch->buffers[r->buffer].traffic;
      *(store ? &t->stored : &t->loaded) += n;
    }
    if (store && role != OUTPUT) report(INPUT_STORE, r->buffer, r->array, offset, where);
    for (size_t at = offset / r->grain; at <= (offset + n - 1) / r->grain; ++at) {
      if (role == OUTPUT) touch(r, at, store, where);
      else r->shadow[at].was_read = true;
    }
    return;
  }
  bool own = (p >= (uintptr_t)__ehdr_start && p < (uintptr_t)_end);  // constants, lanes, addresses
  if (own) return;
  report(WILD, -1, -1, (int64_t)p, where);
  abandoned = true;  // the access would kill the process: this fibre is never resumed
  leave(DONE);
}
#define TRACE(N) \
  void __sanitizer_cov_load##N(void* p) { access((uintptr_t)p, N, false, __builtin_return_address(0)); } \
  void __sanitizer_cov_store##N(void* p) { access((uintptr_t)p, N, true, __builtin_return_address(0)); }
TRACE(1) TRACE(2) TRACE(4) TRACE(8) TRACE(16)
void __sanitizer_cov_trace_pc_guard(uint32_t* guard) {}
void __sanitizer_cov_trace_pc_guard_init(uint32_t* start, uint32_t* stop) {}

static void add_region(uint64_t address, uint64_t bytes, int buffer, int array, uint32_t grain) {
  size_t size = (bytes + grain - 1) / grain;
  Shadow* shadow = calloc(size + 1, sizeof(Shadow));
  regions[n_regions++] =
      (Region){address, address + bytes, buffer, array, grain, size, shadow};
}
static void begin_check(void) {
  n_regions = 0;
  memset(barriers, 0, sizeof barriers);
  for (uint32_t i = 0; i < launch->n_buffers; ++i) {
    Buffer* b = &launch->buffers[i];
    add_region(b->address, b->bytes, i, -1, b->item);
  }
  for (uint64_t i = 0; i < msl_threadgroup_count; ++i)
    add_region((uint64_t)msl_threadgroup_arrays[i], msl_threadgroup_sizes[i], -1, i, 1);
}
static void end_check(void) {
  for (int i = 0; i < n_regions; ++i) {
    Region* r = &regions[i];
    for (size_t k = 0; r->buffer >= 0 && k < r->size; ++k) {
      Traffic* t = &launch->buffers[r->buffer].traffic;
      t->touched_loads += r->shadow[k].was_read * r->grain;
      t->touched_stores += r->shadow[k].was_written * r->grain;
      t->unwritten += launch->buffers[r->buffer].role == OUTPUT && !r->shadow[k].was_written;
    }
    free(r->shadow);
  }
}

// ---- the scheduler -------------------------------------------------------------------------------
static uint32_t random_below(uint32_t n) {
  launch->seed ^= launch->seed << 13, launch->seed ^= launch->seed >> 17;
  launch->seed ^= launch->seed << 5;
  return launch->seed % n;
}
static void arrange(uint32_t* order, uint32_t n) {  // as launch->order says
  for (uint32_t i = 0; i < n; ++i) order[i] = launch->order == 1 ? n - 1 - i : i;
  for (uint32_t i = n; launch->order == 2 && i > 1; --i) {
    uint32_t j = random_below(i), kept = order[i - 1];
    order[i - 1] = order[j], order[j] = kept;
  }
}
// One collective of the simdgroup at base: all its waiting lanes take part.
static bool collective(int base, int n) {
  Lane* first = NULL;
  uint32_t mask = 0;
  for (int i = base; i < base + n; ++i) {
    Lane* x = &lanes[i];
    if (x->state == DONE) continue;
    if (!first) first = x;
    if (x->state != AT_COLLECTIVE || x->op != first->op || x->line != first->line) {
      report(DIVERGENT_SIMD, -1, -1, 0, x->state == AT_COLLECTIVE ? x->line : first->line);
      return false;
    }
    mask |= 1u << (i - base);
  }
  memset(gathered, 0xff, sizeof gathered);
  for (int i = base; i < base + n; ++i) {
    if (!(mask >> (i - base) & 1)) continue;
    memcpy(gathered + (size_t)first->size * (i - base), lanes[i].value, first->size);
    lanes[i].mask = mask, lanes[i].state = READY;
  }
  if (first->op >= SIMD_BARRIER) ++simd_barriers[base / 32];
  return true;
}
// Runs a simdgroup until all its lanes are at a threadgroup barrier or done.
static bool run_simdgroup(int base, int n) {
  uint32_t order[32];
  for (;;) {
    arrange(order, n);
    for (int k = 0; k < n; ++k)
      if (lanes[base + order[k]].state == READY && !abandoned) enter(base + order[k]);
    if (abandoned) return false;
    bool waiting = false;
    for (int i = base; i < base + n; ++i) waiting |= lanes[i].state == AT_COLLECTIVE;
    if (!waiting) return true;
    if (!collective(base, n)) return false;
  }
}
// Lets a threadgroup past a barrier, or says that it is done or stuck.
static enum { PASSED, FINISHED, STUCK } pass_barrier(int n) {
  int done = 0;
  Lane* first = NULL;
  for (int i = 0; i < n; ++i) {
    if (lanes[i].state == DONE) { ++done; continue; }
    if (!first) first = &lanes[i];
    if (lanes[i].line != first->line) {
      report(DIVERGENT_BARRIER, -1, -1, 0, first->line);
      return STUCK;
    }
  }
  if (done == n) return FINISHED;
  if (done) { report(EARLY_RETURN, -1, -1, done, first->line); return STUCK; }
  barriers[0] += (first->flags & DEVICE_MEMORY) != 0;
  barriers[1] += (first->flags & THREADGROUP_MEMORY) != 0;
  for (int i = 0; i < n; ++i) lanes[i].state = READY;
  return PASSED;
}
static int start_group(const uint32_t* full, const uint32_t* groups, const uint32_t* g) {
  uint32_t size[3];
  for (int d = 0; d < 3; ++d) {
    uint32_t left = launch->grid[d] - g[d] * full[d];
    size[d] = left < full[d] ? left : full[d];
  }
  uint32_t n = size[0] * size[1] * size[2];
  for (uint32_t i = 0; i < n; ++i) {
    uint32_t p[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    uint32_t* a = lanes[i].attributes;  // in the order of source.py's ATTRIBUTES
    for (int d = 0; d < 3; ++d) {
      a[d] = g[d] * full[d] + p[d], a[3 + d] = p[d], a[6 + d] = g[d], a[9 + d] = groups[d];
      a[12 + d] = launch->grid[d], a[15 + d] = size[d];
    }
    a[18] = i, a[19] = i % 32, a[20] = i / 32, a[21] = (n + 31) / 32, a[22] = 32;
    lanes[i].state = READY;
    lanes[i].sp = new_fibre(stack_of(i) + STACK, lane_main);
  }
  for (uint64_t i = 0; i < msl_threadgroup_count; ++i)
    memset(msl_threadgroup_arrays[i], 0xff, msl_threadgroup_sizes[i]);  // NaN for floats
  for (int i = 0; launch->check && i < n_regions; ++i)
    if (regions[i].array >= 0) memset(regions[i].shadow, 0, regions[i].size * sizeof(Shadow));
  return n;
}
static bool run_group(const uint32_t* full, const uint32_t* groups, const uint32_t* g) {
  int n = start_group(full, groups, g), simdgroups = (n + 31) / 32;
  uint32_t order[MAX_THREADS / 32];
  for (;;) {
    arrange(order, simdgroups);
    for (int k = 0; k < simdgroups; ++k) {
      int base = order[k] * 32;
      if (!run_simdgroup(base, n - base < 32 ? n - base : 32)) return false;
    }
    int state = pass_barrier(n);
    if (state != PASSED) return state == FINISHED;
  }
}

void msl_launch(Launch* l) {
  launch = l, abandoned = false;
  uint32_t full[3], groups[3];
  for (int d = 0; d < 3; ++d) {
    full[d] = l->threads[d] < l->grid[d] ? l->threads[d] : l->grid[d];
    if (!full[d]) return;
    groups[d] = (l->grid[d] + full[d] - 1) / full[d];
  }
  group_threads = full[0] * full[1] * full[2];
  uint64_t bytes = 0;
  for (uint64_t i = 0; i < msl_threadgroup_count; ++i) bytes += (msl_threadgroup_sizes[i] + 15) & ~15;
  if (group_threads > MAX_THREADS || bytes > MAX_THREADGROUP_BYTES) {
    report(TOO_LARGE, -1, -1, bytes, group_threads);
    return;
  }
  if (!stacks)  // private, anonymous, not reserved; no guard pages, maps are limited in number
    stacks = mmap(NULL, (size_t)MAX_THREADS * STACK, 3, 0x4022, -1, 0);
  for (uint32_t i = 0; i < l->n_buffers; ++i) addresses[i] = l->buffers[i].address;
  if (l->check) begin_check();
  uint32_t n = groups[0] * groups[1] * groups[2];
  uint32_t* order = calloc(n, sizeof *order);
  arrange(order, n);
  for (uint32_t k = 0; k < n; ++k) {
    group_index = order[k];
    uint32_t g[3] = {order[k] % groups[0], order[k] / groups[0] % groups[1],
                     order[k] / (groups[0] * groups[1])};
    if (!run_group(full, groups, g)) break;
  }
  free(order);
  if (l->check) end_check();
}
