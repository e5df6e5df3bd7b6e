/* A driver that a test owns: libnvidia-ml.so.1 with 8 GPUs, for the real pynvml.
 *
 * Behaviour comes from a control page that the test maps too ($PACECAR_STANDIN, see standin.py for the layout); calls
 * are counted there by function and GPU, and so is what a driver need not survive: a shutdown beside a call, a handle
 * from before a shutdown.  Numbers differ in every field and by GPU: base + 1000 * gpu; `zero` makes all
 * of them 0.  Written from the documented interface of nvml.h; it does what a test needs and nothing that a driver is.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef GPUS
#define GPUS 8
#endif
#define FUNCTIONS 96
#define EVENTS 64
#define MIG_GPU 7
#define INSTANCES 3

typedef struct dev_st { int gpu, instance, session; } dev_st, *dev;
typedef unsigned long long u64;
typedef unsigned u32;

typedef struct {
  u32 magic, count, zero, driver_missing;
  u32 driver_life;                 /* raised by the test: the driver was reloaded */
  u32 mig;                         /* 1: GPU 7 has two instances; 2: it is an H100 with 1g.10gb, 1g.10gb and 3g.40gb */
  u32 gpm;                         /* 1: a performance monitor on every GPU */
  u32 nvlink5;                     /* 1: fields 201..222 instead of 138, 139 of links */
  u32 links;                       /* NVLinks of each GPU */
  u32 first;                       /* the GPU that the driver calls 0 */
  u32 fail_function, fail_gpu, fail_code, fail_after; /* function + 1; gpu or ~0; NVML code; calls to let pass */
  u32 fail_for;                    /* how many then fail; ~0 for all */
  u32 hang_ms[GPUS + 1];           /* every call for this GPU is held so long, or until the test writes 0 here */
  u32 lost[GPUS];                  /* code that every call for this GPU returns, 0 for none */
  u32 latency_us;
  u64 pcie_bytes[GPUS];            /* fields 197, 198 when not 0 */
  u32 event_head, event_tail;      /* Xid ring: the test writes, nvmlEventSetWait reads */
  u32 event_gpu[EVENTS], event_xid[EVENTS];
  u32 reasons[GPUS];               /* clock event reasons */
  u32 missing[FUNCTIONS];          /* 1: that function returns FUNCTION_NOT_FOUND */
  u64 calls[FUNCTIONS][GPUS + 1];  /* last column: calls for no GPU */
  u32 inits, shutdowns, hanging;
  u64 ecc[GPUS];                   /* more uncorrected ECC errors than there were */
  u32 link_down[GPUS];             /* link + 1 that is down */
  u32 inside;                      /* calls that have not returned, shutdowns left out */
  u32 shutdowns_beside_calls;      /* shutdowns that began while there were such: a real driver may crash by them */
  u32 void_handles;                /* calls with a handle from before a shutdown: likewise */
  u32 fans;                        /* of each GPU; 0: the chassis cools them, and the driver knows of none */
  u32 delay_us[GPUS + 1];          /* what every call for that GPU takes, beside latency_us */
  u32 delay_of[FUNCTIONS];         /* what that function takes more, for any GPU */
  u32 jitter_percent;              /* up to so much more or less of a delay, at random */
  u32 pcie_generation_max;         /* 0: 5 */
  u32 one_lock;                    /* 1: delayed calls wait for each other, as behind a driver's lock */
  u32 driver;                      /* version: 1000 * major + minor, 580065 is 580.65.06; 0 is 599.77 */
  u32 numbering;                   /* of fields: NEW, OLD or BEFORE, whatever the version says */
  u64 held_ns[GPUS];               /* for which the clocks were held down, in a test's own time; 0: real time by `reasons` */
  u32 c2c;                         /* links of each GPU to a CPU */
  u32 structures;                  /* the newest version of structures that have several; 0: all */
  u32 cost_ns, field_cost_ns;      /* processor time that each call takes, and each field of a call for many */
  u32 idle;                        /* 1: no process is on any GPU */
  u32 sharing[GPUS];               /* 0: two processes and clients of MPS; 1: MPS, its server and two; 2: time-slicing, two */
  u32 unprivileged;                /* 1: in MIG mode only lists of instances are shown */
} control;

static control *page;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  /* of all that follows, and of the failures in the page */
static int session, shut_down;  /* the session now, and the last one that a shutdown ended */
static u32 initialized, life;
static dev_st handles[2][GPUS], handles_mig[2][INSTANCES];  /* a session's handles are not those of the one before */
#define devices handles[session % 2]
#define instances handles_mig[session % 2]

/* When the library is loaded, and not when it is initialized: a driver that was not answers too, and says so. */
__attribute__((constructor)) static void map_page(void) {
  const char *path = getenv("PACECAR_STANDIN");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd >= 0) {
    page = mmap(NULL, sizeof(control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
  } else {
    page = calloc(1, sizeof(control));
    page->count = GPUS; page->gpm = 1; page->mig = 1; page->links = 18;
  }
}

#define LINKS (page->links)
#define IS_CUT(d) (page->mig && (d)->gpu == MIG_GPU)  /* the whole GPU, or one of its instances */

/* Profiles and numbers of GPU instances by the MIG User Guide, "Supported MIG Profiles"; UUIDs as since driver 470. */
typedef struct { u32 gi; u64 bytes; const char *uuid, *name; } profile;
static const profile profiles[INSTANCES] = {
  { 9, 10ULL << 30, "MIG-3b0d6a2c-51a4-5a0e-8a30-6a3c1f0e7d01", "NVIDIA H100 80GB HBM3 MIG 1g.10gb" },
  { 11, 10ULL << 30, "MIG-8f2c4e6a-2c6b-5d1f-9b41-7b4d2a1f8e02", "NVIDIA H100 80GB HBM3 MIG 1g.10gb" },
  { 2, 40ULL << 30, "MIG-c1a3e5f7-0d7c-5e2a-ac52-8c5e3b2a9f03", "NVIDIA H100 80GB HBM3 MIG 3g.40gb" },
};
static const profile *profile_of(dev d) { return page->mig == 2 && d->instance ? &profiles[d->instance - 1] : NULL; }

enum { F_INIT, F_SHUTDOWN, F_DRIVER, F_CUDA, F_COUNT, F_HANDLE, F_UUID, F_NAME, F_PCI, F_VBIOS, F_UTIL, F_MEMORY,
  F_BAR1, F_POWER, F_LIMIT, F_ENERGY, F_TEMP, F_THRESHOLD, F_CLOCK, F_MAXCLOCK, F_REASONS, F_REASONS_SUP, F_PSTATE,
  F_ENC, F_DEC, F_GEN, F_MAXGEN, F_WIDTH, F_MAXWIDTH, F_MIGMODE, F_ARCH, F_GPM_SUPPORT, F_FIELDS, F_PROCS, F_SHARES,
  F_FABRIC, F_LINK_STATE, F_LINK_VERSION, F_LINK_TYPE, F_LINK_PCI, F_MIG_COUNT, F_MIG_HANDLE, F_GI, F_CI, F_GPM_ALLOC,
  F_GPM_FREE, F_GPM_GET, F_GPM_MIG_GET, F_GPM_METRICS, F_EVENT_CREATE, F_EVENT_REGISTER, F_EVENT_WAIT, F_EVENT_FREE,
  F_PERSISTENCE, F_DEFAULT_LIMIT, F_CAPABILITY, F_PEER, F_FANS, F_FAN_SPEED, F_FAN_RPM, F_MARGIN, F_POWER_LIMITS,
  F_SRAM, F_SPARE_ROWS, F_PLATFORM, F_MPS, F_C2C };
enum { NEW, OLD, BEFORE };  /* clock events are fields 269..271 (580.82), 251..253 (575 to 580.65), or are not counted */

static void pause_us(u64 us) {
  struct timespec t = { us / 1000000, us % 1000000 * 1000 };
  nanosleep(&t, NULL);
}

static pthread_mutex_t slow = PTHREAD_MUTEX_INITIALIZER;

static void delay(int function, int gpu) {
  static _Thread_local unsigned seed;
  u64 us = (u64)page->latency_us + page->delay_us[gpu] + page->delay_of[function];
  if (!us) return;
  if (!seed) seed = 1 + (unsigned)(size_t)&seed;
  if (page->jitter_percent) us = us * (100 - page->jitter_percent + rand_r(&seed) % (2 * page->jitter_percent + 1)) / 100;
  if (page->one_lock) pthread_mutex_lock(&slow);
  pause_us(us);
  if (page->one_lock) pthread_mutex_unlock(&slow);
}

/* Take processor time: a real call is spent in the kernel, and does not sleep. */
static void spend(u64 ns) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  u64 until = t.tv_sec * 1000000000ULL + t.tv_nsec + ns;
  do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); while (t.tv_sec * 1000000000ULL + t.tv_nsec < until);
}

static int is_open(void) { return initialized && life == page->driver_life; }

static void hold(int gpu) {
  __sync_fetch_and_add(&page->hanging, 1);
  for (u32 held = 0; held < *(volatile u32 *)&page->hang_ms[gpu]; held++) pause_us(1000);
  __sync_fetch_and_sub(&page->hanging, 1);
}

/* Return the code that the test planted for this call, 0 for none; under the lock, so that each is used once. */
static int planted(int function, int gpu) {
  if (page->fail_function != (u32)function + 1 && page->fail_function != ~0u) return 0;
  if (page->fail_gpu != ~0u && page->fail_gpu != (u32)gpu) return 0;
  if (page->fail_after) { page->fail_after--; return 0; }
  if (!page->fail_for) return 0;
  if (page->fail_for != ~0u) page->fail_for--;
  return page->fail_code;
}

static int judge(int function, dev d) {
  pthread_mutex_lock(&lock);
  int code = 0;
  if (d && d->session <= shut_down) page->void_handles++;
  if (function != F_INIT && function != F_SHUTDOWN && !is_open()) code = 1;
  else if (d && d->session != session) code = 2;
  else if (d && page->lost[d->gpu]) code = page->lost[d->gpu];
  else if (page->missing[function]) code = 13;
  else code = planted(function, d ? d->gpu : GPUS);
  pthread_mutex_unlock(&lock);
  return code;
}

/* Count a call and return the code that the test wants it to give, 0 to go on. */
static int enter(int function, dev d) {
  int gpu = d ? d->gpu : GPUS, code;
  __sync_fetch_and_add(&page->calls[function][gpu], 1);
  delay(function, gpu);
  if (page->cost_ns) spend(page->cost_ns);
  if (function == F_SHUTDOWN) {
    if (page->inside) __sync_fetch_and_add(&page->shutdowns_beside_calls, 1);
    return judge(function, d);
  }
  __sync_fetch_and_add(&page->inside, 1);
  pthread_mutex_lock(&lock);
  int is_held = function == F_INIT || is_open();
  pthread_mutex_unlock(&lock);
  if (is_held && page->hang_ms[gpu]) hold(gpu);
  code = judge(function, d);
  __sync_fetch_and_sub(&page->inside, 1);
  return code;
}

static u64 n(dev d, u64 base) { return page->zero ? 0 : base + 1000 * (u64)(d ? d->gpu : 0) + (d && d->instance ? 500 * d->instance : 0); }
static u32 percent(dev d, u32 base) { return page->zero ? 0 : base + d->gpu; }

#define ENTER(function, d) do { int code_ = enter(function, d); if (code_) return code_; } while (0)
#define NUMBER(name, function, value) int name(dev d, u32 *out) { ENTER(function, d); *out = (u32)(value); return 0; }

int nvmlInitWithFlags(u32 flags) {
  int code = enter(F_INIT, NULL);
  if (code) return code;
  if (page->driver_missing) return 9;
  pthread_mutex_lock(&lock);
  if (life != page->driver_life) initialized = 0;
  if (!initialized++) {
    session++; life = page->driver_life;
    for (int i = 0; i < GPUS; i++) devices[i] = (dev_st){ i, 0, session };
    for (int i = 0; i < INSTANCES; i++) instances[i] = (dev_st){ MIG_GPU, i + 1, session };
  }
  page->inits++;
  pthread_mutex_unlock(&lock);
  return 0;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
  int code = enter(F_SHUTDOWN, NULL);
  if (code) return code;
  while (*(volatile u32 *)&page->hanging) pause_us(1000);  /* as a lock that the hung call holds */
  pthread_mutex_lock(&lock);
  code = !initialized;
  if (!code) { if (!--initialized) shut_down = session; page->shutdowns++; }
  pthread_mutex_unlock(&lock);
  return code;
}
const char *nvmlErrorString(int code) { return "stand-in error"; }
int nvmlSystemGetDriverVersion(char *s, u32 m) {
  ENTER(F_DRIVER, NULL); u32 v = page->driver ? page->driver : 599077;
  snprintf(s, m, page->driver ? "%u.%02u.06" : "%u.%02u", v / 1000, v % 1000); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { ENTER(F_CUDA, NULL); *v = 13010; return 0; }
int nvmlDeviceGetCount_v2(u32 *out) { ENTER(F_COUNT, NULL); *out = page->count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u32 i, dev *out) {
  if (i >= page->count) return 2;
  i += page->first;
  pthread_mutex_lock(&lock);
  dev d = is_open() ? &devices[i] : NULL;
  pthread_mutex_unlock(&lock);
  ENTER(F_HANDLE, d); *out = d; return d ? 0 : 1; }
int nvmlDeviceGetUUID(dev d, char *s, u32 m) {
  ENTER(F_UUID, d);
  const profile *cut = profile_of(d);
  if (cut) snprintf(s, m, "%s", cut->uuid);
  else if (d->instance) snprintf(s, m, "MIG-%d-%d", d->gpu, d->instance); else snprintf(s, m, "GPU-%d", d->gpu);
  return 0; }
int nvmlDeviceGetName(dev d, char *s, u32 m) {
  ENTER(F_NAME, d); const profile *cut = profile_of(d);
  snprintf(s, m, "%s", cut ? cut->name : d->instance ? "Stand-in MIG 3g.71gb" : "Stand-in"); return 0; }
int nvmlDeviceGetVbiosVersion(dev d, char *s, u32 m) { ENTER(F_VBIOS, d); snprintf(s, m, "96.00.%02d", d->gpu); return 0; }
typedef struct { char legacy[16]; u32 domain, bus, device, id, sub; char bus_id[32]; } pci;
int nvmlDeviceGetPciInfo_v3(dev d, pci *p) {
  ENTER(F_PCI, d); memset(p, 0, sizeof *p); snprintf(p->bus_id, 32, "00000000:%02X:00.0", 0x1a + d->gpu); return 0; }

int nvmlDeviceGetUtilizationRates(dev d, u32 *u) {
  ENTER(F_UTIL, d); if (IS_CUT(d)) return 3; u[0] = percent(d, 81); u[1] = percent(d, 31); return 0; }
typedef struct { u32 version; u64 total, reserved, free, used; } mem2;
int nvmlDeviceGetMemoryInfo_v2(dev d, mem2 *m) {
  ENTER(F_MEMORY, d); if (m->version != 0x02000028) return 25;
  const profile *cut = profile_of(d);
  if (cut) { m->total = cut->bytes; m->reserved = 1 << 20; m->used = n(d, 9) << 20; m->free = m->total - m->used - m->reserved; return 0; }
  m->total = n(d, 150010); m->reserved = n(d, 10020); m->free = n(d, 60030); m->used = n(d, 80040); return 0; }
int nvmlDeviceGetMemoryInfo(dev d, u64 *m) {
  ENTER(F_MEMORY, d); m[0] = n(d, 150010); m[1] = n(d, 60030); m[2] = n(d, 90060); return 0; }
int nvmlDeviceGetBAR1MemoryInfo(dev d, u64 *m) { ENTER(F_BAR1, d); m[0] = n(d, 262101); m[1] = n(d, 262001); m[2] = n(d, 102); return 0; }
NUMBER(nvmlDeviceGetPowerUsage, F_POWER, n(d, 650103))
NUMBER(nvmlDeviceGetEnforcedPowerLimit, F_LIMIT, n(d, 700104))
int nvmlDeviceGetTotalEnergyConsumption(dev d, u64 *e) { ENTER(F_ENERGY, d); *e = n(d, 9000000105ULL); return 0; }
int nvmlDeviceGetNumFans(dev d, u32 *out) { ENTER(F_FANS, d); if (!page->fans) return 3; *out = page->fans; return 0; }
int nvmlDeviceGetFanSpeed_v2(dev d, u32 fan, u32 *out) {
  ENTER(F_FAN_SPEED, d); if (fan >= page->fans) return 2; *out = percent(d, 45 + 10 * fan); return 0; }
typedef struct { u32 version, fan, speed; } fan_info;
int nvmlDeviceGetFanSpeedRPM(dev d, fan_info *f) {
  ENTER(F_FAN_RPM, d); if (f->version != 0x100000C) return 25; if (f->fan >= page->fans) return 2;
  f->speed = (u32)n(d, 1500 + 100 * f->fan); return 0; }
int nvmlDeviceGetTemperature(dev d, int sensor, u32 *t) { ENTER(F_TEMP, d); *t = percent(d, 61); return 0; }
int nvmlDeviceGetTemperatureThreshold(dev d, int which, u32 *t) { ENTER(F_THRESHOLD, d); *t = percent(d, 90 + 10 * which); return 0; }
int nvmlDeviceGetClockInfo(dev d, int c, u32 *m) { ENTER(F_CLOCK, d); *m = (u32)n(d, 1101 + 10 * c); return 0; }
int nvmlDeviceGetMaxClockInfo(dev d, int c, u32 *m) { ENTER(F_MAXCLOCK, d); *m = (u32)n(d, 1901 + 10 * c); return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(dev d, u64 *m) { ENTER(F_REASONS, d); *m = page->reasons[d->gpu]; return 0; }
int nvmlDeviceGetSupportedClocksEventReasons(dev d, u64 *m) { ENTER(F_REASONS_SUP, d); *m = 0x1ed; return 0; }
NUMBER(nvmlDeviceGetPerformanceState, F_PSTATE, page->zero ? 0 : 1 + d->gpu)
int nvmlDeviceGetEncoderUtilization(dev d, u32 *u, u32 *period) { ENTER(F_ENC, d); *u = percent(d, 41); *period = 1; return 0; }
int nvmlDeviceGetDecoderUtilization(dev d, u32 *u, u32 *period) { ENTER(F_DEC, d); *u = percent(d, 51); *period = 1; return 0; }
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, F_GEN, page->zero ? 0 : 4)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, F_MAXGEN, page->zero ? 0 : page->pcie_generation_max ? page->pcie_generation_max : 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, F_WIDTH, page->zero ? 0 : 8)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, F_MAXWIDTH, page->zero ? 0 : 16)
int nvmlDeviceGetMigMode(dev d, u32 *now, u32 *pending) {
  ENTER(F_MIGMODE, d); *now = *pending = page->mig && d->gpu == MIG_GPU; return 0; }
NUMBER(nvmlDeviceGetArchitecture, F_ARCH, 9)
NUMBER(nvmlDeviceGetPersistenceMode, F_PERSISTENCE, d->gpu % 2)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, F_DEFAULT_LIMIT, n(d, 700204))
int nvmlDeviceGetPowerManagementLimitConstraints(dev d, u32 *low, u32 *high) {
  ENTER(F_POWER_LIMITS, d); *low = (u32)n(d, 200304); *high = (u32)n(d, 750404); return 0; }
typedef struct { u32 version; int margin; } margin;
int nvmlDeviceGetMarginTemperature(dev d, margin *m) {
  ENTER(F_MARGIN, d); if (m->version != 0x1000008) return 25; m->margin = page->zero ? 0 : d->gpu == 3 ? -3 : 23 + d->gpu; return 0; }
typedef struct { u32 version; u64 agg_parity, agg_sec_ded, agg, vol_parity, vol_sec_ded, vol, units[5]; u32 over; } sram;
int nvmlDeviceGetSramEccErrorStatus(dev d, sram *s) {
  ENTER(F_SRAM, d); if (s->version != 0x1000068) return 25;
  *s = (sram){ s->version, n(d, 311), n(d, 312), n(d, 313), n(d, 314), n(d, 315), n(d, 316), { 1, 2, 3, 4, 5 }, !page->zero && d->gpu == 2 };
  return 0; }
int nvmlDeviceGetRowRemapperHistogram(dev d, u32 *h) {
  ENTER(F_SPARE_ROWS, d); for (u32 i = 0; i < 5; i++) h[i] = (u32)n(d, 640 - i); return 0; }
typedef struct { u32 version; unsigned char ib[16], chassis[16], slot, tray, host, peer, module; } platform;
int nvmlDeviceGetPlatformInfo(dev d, platform *p) {
  ENTER(F_PLATFORM, d); u32 newest = page->structures == 1 ? 1 : 2;
  if (p->version != 0x100002c && p->version != 0x200002c) return 25;
  if (p->version >> 24 > newest) return 25;
  memset(p->chassis, 0, 16); p->slot = p->tray = 0; p->host = 1; p->peer = 2; p->module = 1 + d->gpu;
  if (!page->links) return 0; // a board that stands alone, in no chassis
  memcpy(p->chassis, "1821425190001", 13); p->slot = 9; p->tray = 4; return 0; }
int nvmlDeviceGetC2cModeInfoV(dev d, u32 *on) {
  ENTER(F_C2C, d); if (!page->c2c) return 3; *on = !page->zero; return 0; }
int nvmlDeviceGetCudaComputeCapability(dev d, int *major, int *minor) {
  ENTER(F_CAPABILITY, d); *major = 9; *minor = d->gpu; return 0; }
int nvmlDeviceGetP2PStatus(dev d, dev other, int index, int *status) {
  ENTER(F_PEER, d); *status = index == 0 ? (d->gpu + other->gpu) % 7 : 77; return 0; }

typedef struct { uint32_t field, scope; int64_t stamp, latency; u32 type, ret; union { u64 ull; u32 ui; } v; } fv;
static u64 now_ns(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ULL + t.tv_nsec; }
/* Return for how long a reason held the clocks of a GPU down: as its bit in `reasons` was set, and as the test says. */
static u64 held(dev d, int which) {
  static const u32 bits[] = { 0x4, 0x10, 0x20, 0x40, 0x80 };  /* in the order of the fields */
  static u64 total[GPUS][5], last[GPUS][5];
  u64 now = now_ns();
  pthread_mutex_lock(&lock);
  if (last[d->gpu][which] && !page->held_ns[d->gpu] && page->reasons[d->gpu] & bits[which])
    total[d->gpu][which] += now - last[d->gpu][which];
  last[d->gpu][which] = now;
  u64 sum = total[d->gpu][which] + (page->reasons[d->gpu] & bits[which] ? page->held_ns[d->gpu] : 0);
  pthread_mutex_unlock(&lock);
  return page->zero ? 0 : sum;
}
int nvmlDeviceGetFieldValues(dev d, int count, fv *f) {
  ENTER(F_FIELDS, d);
  if (page->field_cost_ns) spend((u64)count * page->field_cost_ns);
  for (int i = 0; i < count; i++) {
    u32 id = f[i].field, scope = f[i].scope, link = scope < LINKS;
    f[i].ret = 0; f[i].type = 3; f[i].v.ull = n(d, 5000000000ULL + 100000ULL * id + (link ? scope : 0));
    switch (id) {
      case 82: f[i].type = 1; f[i].v.ull = percent(d, 71); break;
      case 83: f[i].v.ull = page->zero ? 0 : n(d, 0) + now_ns() / 1000000 * 600 / 1000; break;  /* 600 W */
      case 91: f[i].type = 1; f[i].v.ull = LINKS; break;
      case 138: case 139:
        if (link ? page->nvlink5 : scope != 0xFFFFFFFF) f[i].ret = 3;
        if (page->nvlink5) f[i].ret = 3;
        break;
      case 165: f[i].type = 1; f[i].v.ull = !page->zero && page->link_down[d->gpu] != scope + 1; if (!link) f[i].ret = 2; break;
      case 161: case 162: case 163: if (page->nvlink5 || !link) f[i].ret = 3; break;
      case 164: f[i].type = 1; f[i].v.ull = page->zero ? 0 : 26562; break;
      case 197: case 198:
        f[i].type = page->pcie_bytes[d->gpu] ? 1 : 3;
        if (page->pcie_bytes[d->gpu]) f[i].v.ull = (u32)page->pcie_bytes[d->gpu];
        break;
      case 29: case 30: case 31: case 142: case 143: case 144: case 145: f[i].type = 1; f[i].v.ull = page->zero ? 0 : id; break;
      case 4: case 6: f[i].v.ull += page->ecc[d->gpu]; break;
      case 3: case 5: case 94: break;
      case 74: f[i].v.ull += held(d, 0); break;
      case 76: f[i].v.ull += held(d, 1); break;
      case 251: case 252: case 253:
        if (page->numbering == OLD) f[i].v.ull += held(d, 2 + id - 251); else f[i].v.ull = 80;  /* power smoothing */
        break;
      case 269: case 270: case 271:
        if (page->numbering == NEW) f[i].v.ull += held(d, 2 + id - 269);
        else if (page->numbering == OLD) f[i].v.ull = 80; else f[i].ret = 3;
        if (page->numbering == NEW && id == 271) f[i].ret = 3;
        break;
      case 1: case 2: f[i].type = 1; f[i].v.ull = !page->zero; break;
      case 193: case 194: case 195: case 196: f[i].type = 5; f[i].v.ui = page->zero ? 0 : (u32)(id == 193 ? -5 : (int)id - 192); break;
      case 170: f[i].type = 1; f[i].v.ull = page->c2c; break;
      case 171: case 172: case 231: case 232: case 233:
        if (scope >= page->c2c) { f[i].ret = 2; break; }
        if (id == 171) f[i].v.ull = !page->zero; else if (id == 172) f[i].v.ull = page->zero ? 0 : 44712;
        break;
      case 218: case 220: case 222: f[i].type = 0; break;
      default: if (id < 201 || id > 221 || !page->nvlink5 || !link) f[i].ret = 3;
    }
  }
  return 0;
}

typedef struct { u32 pid; u64 memory; u32 gi, ci; } proc;
int nvmlDeviceGetComputeRunningProcesses_v3(dev d, u32 *count, proc *p) {
  ENTER(F_PROCS, d);
  if (page->unprivileged && IS_CUT(d) && !d->instance) return 4;
  u32 have = page->idle ? 0 : !page->zero ? 2 : d->gpu && !d->instance, room = *count;
  if (page->sharing[d->gpu] == 1) have = 1;
  if (page->mig == 2 && IS_CUT(d)) have = d->instance ? 1 : INSTANCES;  /* that of the whole GPU is of all instances */
  *count = have;
  if (room < have) return 7;
  for (u32 i = 0; i < have; i++) {
    u32 at = page->mig == 2 && d->instance ? d->instance - 1u : i;
    p[i] = (proc){ 4000 + 10 * d->gpu + at, n(d, 7000 + i), ~0u, ~0u };
  }
  return 0;
}
typedef struct { u32 pid; u64 stamp; u32 sm, mem, enc, dec; } share;
int nvmlDeviceGetProcessUtilization(dev d, share *s, u32 *count, u64 since) {
  ENTER(F_SHARES, d);
  if (page->mig == 2 && IS_CUT(d)) return 3;
  u32 have = page->idle ? 0 : page->zero ? 1 : 2, room = s ? *count : 0;
  *count = have;
  if (!have) return 6;
  if (room < have) return 7;
  for (u32 i = 0; i < have; i++) s[i] = (share){ 4000 + 10 * d->gpu + i, since + 1 + i, percent(d, 11 + 20 * i), 1, 0, 0 };
  return 0;
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(dev d, u32 *count, proc *p) {
  ENTER(F_MPS, d);
  if (page->unprivileged && IS_CUT(d) && !d->instance) return 4;
  u32 have = page->zero || page->idle ? 0 : 1 + d->gpu, room = *count;
  if (page->sharing[d->gpu]) have = page->sharing[d->gpu] == 1 ? 2 : 0;
  if (page->mig == 2 && IS_CUT(d)) have = 0;
  *count = have;
  if (room < have) return 7;
  for (u32 i = 0; i < have; i++) p[i] = (proc){ 6000 + 10 * d->gpu + i, n(d, 300 + i), ~0u, ~0u };
  return 0;
}
typedef struct { u32 version; unsigned char uuid[16]; int status; u32 clique, state, mask; unsigned char health; } fabric;
int nvmlDeviceGetGpuFabricInfoV(dev d, fabric *f) {
  ENTER(F_FABRIC, d); u32 newest = page->structures ? page->structures : 3;
  if (newest == 1) return 13;
  if (f->version != 0x2000024 && f->version != 0x3000028) return 25;
  if (f->version >> 24 > newest) return 25;
  memset(f->uuid, 0xa0 + d->gpu, 16);
  f->status = page->zero ? 0 : 21; f->clique = 5; f->state = page->zero ? 1 : 3; f->mask = page->zero ? 0x51aa : 0xa255;
  if (f->version >> 24 == 3) f->health = page->zero ? 2 : 1;
  return 0; }
int nvmlDeviceGetGpuFabricInfo(dev d, fabric *f) {  /* without a version in front */
  ENTER(F_FABRIC, d); memset((char *)f, 0xa0 + d->gpu, 16); u32 *rest = (u32 *)((char *)f + 16);
  rest[0] = 21; rest[1] = 5; rest[2] = 3; return 0; }
int nvmlDeviceGetNvLinkState(dev d, u32 link, u32 *active) {
  ENTER(F_LINK_STATE, d); if (link >= LINKS) return 2; *active = !page->zero; return 0; }
int nvmlDeviceGetNvLinkVersion(dev d, u32 link, u32 *v) { ENTER(F_LINK_VERSION, d); *v = page->nvlink5 ? 7 : 6; return 0; }
#define IS_DOWN(d, link) (page->link_down[(d)->gpu] == (link) + 1)
int nvmlDeviceGetNvLinkRemoteDeviceType(dev d, u32 link, u32 *t) {
  ENTER(F_LINK_TYPE, d); *t = IS_DOWN(d, link) ? 255 : 2; return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(dev d, u32 link, pci *p) {
  ENTER(F_LINK_PCI, d); if (IS_DOWN(d, link)) return 3;
  memset(p, 0, sizeof *p); snprintf(p->bus_id, 32, "00000000:C%X:00.0", link % 4); return 0; }

int nvmlDeviceGetMaxMigDeviceCount(dev d, u32 *c) { ENTER(F_MIG_COUNT, d); *c = d->gpu == MIG_GPU ? 7 : 0; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(dev d, u32 i, dev *out) {
  ENTER(F_MIG_HANDLE, d); if (!IS_CUT(d) || i >= (page->mig == 2 ? INSTANCES : 2)) return 6; *out = &instances[i]; return 0; }
NUMBER(nvmlDeviceGetGpuInstanceId, F_GI, profile_of(d) ? profile_of(d)->gi : (u32)d->instance)
NUMBER(nvmlDeviceGetComputeInstanceId, F_CI, 0)

typedef struct { dev device; int instance; u64 at; } gpm_sample;
typedef struct { u32 id; int ret; double value; const char *names[3]; } gpm_metric;
typedef struct { u32 version, count; gpm_sample *one, *two; gpm_metric metrics[477]; } gpm_get;  /* 98, 210, 333 before: version 1 all of them */
typedef struct { u32 version, supported; } gpm_support;
int nvmlGpmQueryDeviceSupport(dev d, gpm_support *s) { ENTER(F_GPM_SUPPORT, d); s->supported = page->gpm; return 0; }
int nvmlGpmSampleAlloc(gpm_sample **s) { ENTER(F_GPM_ALLOC, NULL); *s = calloc(1, sizeof **s); return 0; }
int nvmlGpmSampleFree(gpm_sample *s) { ENTER(F_GPM_FREE, NULL); free(s); return 0; }
int nvmlGpmSampleGet(dev d, gpm_sample *s) {
  ENTER(F_GPM_GET, d); if (IS_CUT(d)) return 3; *s = (gpm_sample){ d, 0, now_ns() }; return 0; }
int nvmlGpmMigSampleGet(dev d, u32 gi, gpm_sample *s) { ENTER(F_GPM_MIG_GET, d); *s = (gpm_sample){ d, gi, now_ns() }; return 0; }
int nvmlGpmMetricsGet(gpm_get *g) {
  ENTER(F_GPM_METRICS, g->one->device);
  if (!g->one->device || !g->two->device) return 2;  /* one that was never read */
  if (g->version != 1) return 25;
  if (g->two->at <= g->one->at) return 2;
  for (u32 i = 0; i < g->count; i++) {
    g->metrics[i].ret = g->metrics[i].id == 8 ? 3 : 0;  /* one that this GPU lacks */
    g->metrics[i].value = page->zero ? 0 : g->metrics[i].id + g->one->device->gpu + 0.25 + g->one->instance;
  }
  for (u32 i = g->count; i < 477; i++) g->metrics[i].ret = 3;  /* a driver may write all of what its header says */
  return 0;
}

typedef struct { dev device; u64 type, data; u32 gi, ci; } event;
int nvmlEventSetCreate(void **set) { ENTER(F_EVENT_CREATE, NULL); *set = &page; return 0; }
int nvmlDeviceRegisterEvents(dev d, u64 types, void *set) { ENTER(F_EVENT_REGISTER, d); return 0; }
int nvmlEventSetWait_v2(void *set, event *e, u32 ms) {
  ENTER(F_EVENT_WAIT, NULL);
  if (page->event_tail == page->event_head) { pause_us(1000ULL * ms); return 10; }
  u32 at = page->event_tail++ % EVENTS;
  *e = (event){ &devices[page->event_gpu[at]], 8, page->event_xid[at], ~0u, ~0u };
  return 0;
}
int nvmlEventSetFree(void *set) { ENTER(F_EVENT_FREE, NULL); return 0; }
