/* Copyright (c) 2026 The rankzero.inference authors
 * GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 */
/*
 * fake_nvml - a stand-in for NVIDIA's libnvidia-ml.so.1, for tests on machines
 * that have no GPU.  It exports the NVML C ABI that real clients (pynvml /
 * nvidia-ml-py, and programs that dlopen the library) call, and answers from a
 * plain text state file.  See README.md for the file format.
 *
 * Own work: written from the public API contract (names, argument lists,
 * return codes, structure layouts), no code taken from NVIDIA.
 *
 * Life cycle, as on a real host:
 *   - the GPU table (gpu/mig/topo/nvlink lines) is read at the nvmlInit that
 *     takes the reference count from 0 to 1, and stays until nvmlShutdown;
 *   - processes, memory held, health, injected errors and delays are re-read
 *     when the state file changes; the process directory on every query.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef FAKE_NVML_DEFAULT_STATE
#define FAKE_NVML_DEFAULT_STATE "/run/fake_nvml/state"
#endif

#define API __attribute__((visibility("default")))

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int ret_t;

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4,
    NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25, UNKNOWN = 999
};

static const struct { int code; const char *name, *text; } ERRORS[] = {
    {0, "SUCCESS", "Success"},
    {1, "UNINITIALIZED", "Uninitialized"},
    {2, "INVALID_ARGUMENT", "Invalid Argument"},
    {3, "NOT_SUPPORTED", "Not Supported"},
    {4, "NO_PERMISSION", "Insufficient Permissions"},
    {5, "ALREADY_INITIALIZED", "Already Initialized"},
    {6, "NOT_FOUND", "Not Found"},
    {7, "INSUFFICIENT_SIZE", "Insufficient Size"},
    {8, "INSUFFICIENT_POWER", "Insufficient External Power"},
    {9, "DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {10, "TIMEOUT", "Timeout"},
    {11, "IRQ_ISSUE", "Interrupt Request Issue"},
    {12, "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"},
    {13, "FUNCTION_NOT_FOUND", "Function Not Found"},
    {14, "CORRUPTED_INFOROM", "Corrupted infoROM"},
    {15, "GPU_IS_LOST", "GPU is lost"},
    {16, "RESET_REQUIRED", "GPU requires restart"},
    {17, "OPERATING_SYSTEM", "The operating system has blocked the request."},
    {18, "LIB_RM_VERSION_MISMATCH", "RM has detected an NVML/RM version mismatch."},
    {19, "IN_USE", "In Use"},
    {20, "MEMORY", "Insufficient Memory"},
    {21, "NO_DATA", "No Data"},
    {22, "VGPU_ECC_NOT_SUPPORTED", "vGPU ECC not supported"},
    {23, "INSUFFICIENT_RESOURCES", "Insufficient Resources"},
    {24, "FREQ_NOT_SUPPORTED", "Frequency not supported"},
    {25, "ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"},
    {26, "DEPRECATED", "Deprecated"},
    {27, "NOT_READY", "Not Ready"},
    {28, "GPU_NOT_FOUND", "GPU not found"},
    {29, "INVALID_STATE", "Invalid state"},
    {30, "RESET_TYPE_NOT_SUPPORTED", "Reset type not supported"},
    {999, "UNKNOWN", "Unknown Error"},
};
#define NERRORS (sizeof ERRORS / sizeof *ERRORS)

/* ------------------------------------------------------------------ model */

#define MAX_GPU 64
#define MAX_MIG 256
#define MAX_PROC 4096
#define MAX_RULE 256
#define MAX_LINK 36
#define NA64 (~0ULL)
#define NA32 (~0U)

typedef struct {
    u32 magic;                     /* 'G' or 'M': what a handle points at */
    int present, lost, hidden;     /* hidden: NO_PERMISSION on the handle */
    u32 index, minor, domain, bus, dev, devid, subsys, board;
    char name[96], uuid[96], serial[30], pci[32], cpus[512], part[80];
    u64 total, reserved, base_used, bar1;
    int memory_supported, mig_capable, mig, mig_pending, persistence, cc_major, cc_minor;
    int numa, gpu_numa, arch, compute_mode, module, addressing;
    int ecc, ecc_pending;          /* -1: no ECC on this card */
    u64 ecc_corrected, ecc_uncorrected;
    int rows_supported; u32 rows_corrected, rows_uncorrected, rows_pending, rows_failure;
    int retired_sbe, retired_dbe, retired_pending;   /* sbe -1: not supported (Ampere and later) */
    int recovery;                  /* -1: field not supported */
    char chassis[17]; int slot, tray;
    int nlinks, nvlink_version, nvlink_remote;
    signed char link_state[MAX_LINK];
    char link_pci[MAX_LINK][32];
    int fabric;                    /* -1: call not supported; else state 0..3 */
    int fabric_status; u32 clique, health; unsigned char health_summary;
    unsigned char cluster[16];
    u32 util_gpu, util_mem;
} gpu_t;

typedef struct {
    u32 magic, gpu, index, gi, ci, slices, sms;
    int present;
    char uuid[96], name[96];
    u64 total, reserved, base_used;
} mig_t;

/* after: how many list calls pass before the entry shows up (a process that starts between two calls) */
typedef struct { int gpu; u32 pid, gi, ci; u64 bytes; char type; int after; } proc_t;
typedef struct { char pat[96]; int code, gpu, is_delay, ms, times, after; } rule_t;
typedef struct { char key[160]; int calls, fired; } count_t;

typedef struct {
    char driver[80], nvml[80], branch[80];
    int cuda, ngpu, nmig, nproc, nstatic, nrule;   /* the first nstatic processes stand in the state file */
    gpu_t gpu[MAX_GPU];
    mig_t mig[MAX_MIG];
    signed char topo[MAX_GPU][MAX_GPU];
    proc_t proc[MAX_PROC];
    rule_t rule[MAX_RULE];
    char procdir[512];
    int procdir_prune;
    int empty_ok;                  /* nvmlInit succeeds without a GPU */
} state_t;

static pthread_mutex_t L = PTHREAD_MUTEX_INITIALIZER;
static state_t S;                  /* what clients see */
static state_t T;                  /* scratch for re-reads */
static count_t C[MAX_RULE];
static int nC, refs;
static int list_calls;             /* calls of any process list since nvmlInit */
static struct stat last_st;

/* ----------------------------------------------------------------- parser */

static char *val(char *line, const char *key, char *buf, size_t n) {
    /* key=value or key="value with spaces" */
    size_t k = strlen(key);
    for (char *p = line; *p;) {
        while (isspace((unsigned char)*p)) p++;
        char *start = p;
        int q = 0;
        while (*p && (q || !isspace((unsigned char)*p))) { if (*p == '"') q = !q; p++; }
        if ((size_t)(p - start) > k && !strncmp(start, key, k) && start[k] == '=') {
            char *v = start + k + 1, *e = p;
            if (*v == '"') { v++; if (e > v && e[-1] == '"') e--; }
            size_t len = (size_t)(e - v);
            if (len >= n) len = n - 1;
            memcpy(buf, v, len);
            buf[len] = 0;
            return buf;
        }
    }
    return NULL;
}

static u64 bytes(const char *s, u64 dflt_unit) {
    if (!strcasecmp(s, "na")) return NA64;
    char *e;
    double d = strtod(s, &e);
    u64 unit = dflt_unit;
    if (!strcasecmp(e, "b")) unit = 1;
    else if (!strncasecmp(e, "k", 1)) unit = 1ULL << 10;
    else if (!strncasecmp(e, "m", 1)) unit = 1ULL << 20;
    else if (!strncasecmp(e, "g", 1)) unit = 1ULL << 30;
    return (u64)(d * (double)unit);
}

static long num(char *line, const char *key, long dflt) {
    char b[128];
    return val(line, key, b, sizeof b) ? strtol(b, NULL, 0) : dflt;
}

static int errcode(const char *s) {
    if (isdigit((unsigned char)*s)) return atoi(s);
    if (!strncmp(s, "NVML_", 5)) s += 5;
    if (!strncmp(s, "ERROR_", 6)) s += 6;
    for (size_t i = 0; i < NERRORS; i++) if (!strcasecmp(s, ERRORS[i].name)) return ERRORS[i].code;
    return UNKNOWN;
}

static int parse_pci(const char *s, u32 *dom, u32 *bus, u32 *dev) {
    u32 a, b, c, d;
    if (sscanf(s, "%x:%x:%x.%x", &a, &b, &c, &d) >= 3 && strchr(s, ':') != strrchr(s, ':')) { *dom = a; *bus = b; *dev = c; return 1; }
    if (sscanf(s, "%x:%x.%x", &b, &c, &d) >= 2) { *dom = 0; *bus = b; *dev = c; return 1; }
    return 0;
}

static void parse_uuid16(const char *s, unsigned char out[16]) {
    int n = 0, hi = -1;
    for (; *s && n < 16; s++) {
        if (!isxdigit((unsigned char)*s)) continue;
        int v = isdigit((unsigned char)*s) ? *s - '0' : tolower(*s) - 'a' + 10;
        if (hi < 0) hi = v; else { out[n++] = (unsigned char)(hi << 4 | v); hi = -1; }
    }
}

static int level(const char *s) {
    static const struct { const char *n; int v; } T_[] = {{"internal", 0}, {"single", 10}, {"multiple", 20}, {"hostbridge", 30}, {"node", 40}, {"system", 50}};
    for (size_t i = 0; i < sizeof T_ / sizeof *T_; i++) if (!strcasecmp(s, T_[i].n)) return T_[i].v;
    return atoi(s);
}

static int recovery_action(const char *s) {
    static const char *const names[] = {"none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain",
                                        "bus_reset", "system_reboot"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (!strcasecmp(s, names[i])) return (int)i;
    return isdigit((unsigned char)*s) ? atoi(s) : -1;         /* "unsupported" */
}

/* a key that no reader asks for is a typo in a test: say so when asked to */
static void check_keys(const char *path, const char *line, const char *const *known) {
    if (!getenv("FAKE_NVML_STRICT")) return;
    int quoted = 0;
    for (const char *p = line; *p;) {
        while (isspace((unsigned char)*p)) p++;
        const char *start = p, *eq = NULL;
        for (; *p && (quoted || !isspace((unsigned char)*p)); p++) {
            if (*p == '"') quoted = !quoted;
            if (*p == '=' && !eq) eq = p;
        }
        if (!eq) continue;
        int found = 0;
        for (const char *const *k = known; *k && !found; k++) found = strlen(*k) == (size_t)(eq - start) && !strncmp(start, *k, (size_t)(eq - start));
        if (!found) fprintf(stderr, "fake_nvml: %s: unknown key %.*s\n", path, (int)(eq - start), start);
    }
}
static const char *const GPU_KEYS[] = {
    "name", "uuid", "serial", "part", "pci", "cpus", "total", "reserved", "used", "bar1", "memory", "cc", "mig", "mig_pending", "devid", "subsys", "minor",
    "numa", "gpu_numa", "arch", "module", "persistence", "compute_mode", "ecc", "ecc_pending", "ecc_corrected", "ecc_uncorrected", "rows", "rows_corrected",
    "rows_uncorrected", "rows_pending", "rows_failure", "retired_sbe", "retired_dbe", "retired_pending", "recovery", "chassis", "slot", "tray", "lost",
    "denied", "nvlinks", "nvlink_version", "util", "util_mem", "nvlink_remote", "addressing", "fabric", "fabric_status", "clique", "health",
    "health_summary", "cluster", NULL};
static const char *const MIG_KEYS[] = {"gpu", "index", "gi", "ci", "slices", "sms", "total", "reserved", "used", "name", "uuid", NULL};
static const char *const PROC_KEYS[] = {"gpu", "pid", "gi", "ci", "mib", "type", "after", NULL};
static const char *const RULE_KEYS[] = {"gpu", "times", "after", NULL};

static void gpu_line(state_t *st, char *l, int from, int to) {
    char b[512];
    for (int i = from; i <= to && i < MAX_GPU; i++) {
        gpu_t *g = &st->gpu[i];
        if (!g->present) {
            memset(g, 0, sizeof *g);
            g->magic = 'G'; g->present = 1; g->index = (u32)i; g->minor = (u32)i;
            snprintf(g->name, sizeof g->name, "NVIDIA Fake GPU");
            snprintf(g->uuid, sizeof g->uuid, "GPU-00000000-0000-0000-0000-%012d", i);
            g->bus = (u32)(0x10 + i); g->devid = 0x233010de; g->subsys = 0x16c110de;
            g->total = 80ULL << 30; g->memory_supported = 1; g->bar1 = 128ULL << 30;
            g->cc_major = 9; g->mig_capable = 1; g->numa = -1; g->gpu_numa = -1; g->arch = 9;
            g->nvlink_remote = 2; g->fabric = -1; g->module = i; g->board = (u32)(0x100 + i);
            memset(g->link_state, -1, sizeof g->link_state);
            g->rows_supported = 1; g->retired_sbe = -1; g->recovery = 0; g->slot = g->tray = -1;
            if (st->ngpu <= i) st->ngpu = i + 1;
        }
        if (val(l, "name", b, sizeof b)) snprintf(g->name, sizeof g->name, "%.95s", b);
        if (val(l, "uuid", b, sizeof b)) {
            /* in a range, '%d' becomes the index */
            char *pc = strstr(b, "%d");
            if (pc) { *pc = 0; snprintf(g->uuid, sizeof g->uuid, "%.60s%d%.20s", b, i, pc + 2); }
            else snprintf(g->uuid, sizeof g->uuid, "%.90s", b);
        }
        if (val(l, "serial", b, sizeof b)) snprintf(g->serial, sizeof g->serial, "%.29s", b);
        if (val(l, "part", b, sizeof b)) snprintf(g->part, sizeof g->part, "%.79s", b);
        if (val(l, "pci", b, sizeof b)) parse_pci(b, &g->domain, &g->bus, &g->dev);
        if (val(l, "cpus", b, sizeof b)) snprintf(g->cpus, sizeof g->cpus, "%.511s", b);
        if (val(l, "total", b, sizeof b)) g->total = bytes(b, 1ULL << 20);
        if (val(l, "reserved", b, sizeof b)) g->reserved = bytes(b, 1ULL << 20);
        if (val(l, "used", b, sizeof b)) g->base_used = bytes(b, 1ULL << 20);
        if (val(l, "bar1", b, sizeof b)) g->bar1 = bytes(b, 1ULL << 20);
        if (val(l, "memory", b, sizeof b)) g->memory_supported = strcasecmp(b, "unsupported") != 0;
        if (val(l, "cc", b, sizeof b)) sscanf(b, "%d.%d", &g->cc_major, &g->cc_minor);
        if (val(l, "mig", b, sizeof b)) {
            g->mig_capable = strcasecmp(b, "unsupported") != 0;
            g->mig = g->mig_pending = g->mig_capable && (*b == '1' || !strcasecmp(b, "on"));
        }
        g->mig_pending = (int)num(l, "mig_pending", g->mig_pending);
        g->devid = (u32)num(l, "devid", (long)g->devid);
        g->subsys = (u32)num(l, "subsys", (long)g->subsys);
        g->minor = (u32)num(l, "minor", (long)g->minor);
        g->numa = (int)num(l, "numa", g->numa);
        g->gpu_numa = (int)num(l, "gpu_numa", g->gpu_numa);
        g->arch = (int)num(l, "arch", g->arch);
        g->module = (int)num(l, "module", g->module);
        g->persistence = (int)num(l, "persistence", g->persistence);
        g->compute_mode = (int)num(l, "compute_mode", g->compute_mode);
        if (val(l, "ecc", b, sizeof b)) g->ecc = g->ecc_pending = !strcasecmp(b, "unsupported") ? -1 : *b == '1' || !strcasecmp(b, "on");
        g->ecc_pending = (int)num(l, "ecc_pending", g->ecc_pending);
        g->ecc_corrected = (u64)num(l, "ecc_corrected", (long)g->ecc_corrected);
        g->ecc_uncorrected = (u64)num(l, "ecc_uncorrected", (long)g->ecc_uncorrected);
        if (val(l, "rows", b, sizeof b)) g->rows_supported = strcasecmp(b, "unsupported") != 0;
        g->rows_corrected = (u32)num(l, "rows_corrected", (long)g->rows_corrected);
        g->rows_uncorrected = (u32)num(l, "rows_uncorrected", (long)g->rows_uncorrected);
        g->rows_pending = (u32)num(l, "rows_pending", (long)g->rows_pending);
        g->rows_failure = (u32)num(l, "rows_failure", (long)g->rows_failure);
        g->retired_sbe = (int)num(l, "retired_sbe", g->retired_sbe);
        g->retired_dbe = (int)num(l, "retired_dbe", g->retired_dbe);
        g->retired_pending = (int)num(l, "retired_pending", g->retired_pending);
        if (val(l, "recovery", b, sizeof b)) g->recovery = recovery_action(b);
        if (val(l, "chassis", b, sizeof b)) snprintf(g->chassis, sizeof g->chassis, "%.16s", b);
        g->slot = (int)num(l, "slot", g->slot);
        g->tray = (int)num(l, "tray", g->tray);
        g->lost = (int)num(l, "lost", g->lost);
        g->hidden = (int)num(l, "denied", g->hidden);
        g->nlinks = (int)num(l, "nvlinks", g->nlinks);
        if (g->nlinks > MAX_LINK) g->nlinks = MAX_LINK;
        g->nvlink_version = (int)num(l, "nvlink_version", g->nvlink_version);
        g->util_gpu = (u32)num(l, "util", (long)g->util_gpu);
        g->util_mem = (u32)num(l, "util_mem", (long)g->util_mem);
        if (val(l, "nvlink_remote", b, sizeof b)) g->nvlink_remote = !strcasecmp(b, "switch") ? 2 : !strcasecmp(b, "gpu") ? 0 : 255;
        if (val(l, "addressing", b, sizeof b)) g->addressing = !strcasecmp(b, "hmm") ? 1 : !strcasecmp(b, "ats") ? 2 : 0;
        if (val(l, "fabric", b, sizeof b))
            g->fabric = !strcasecmp(b, "not_supported") ? 0 : !strcasecmp(b, "not_started") ? 1 : !strcasecmp(b, "in_progress") ? 2
                      : !strcasecmp(b, "completed") ? 3 : -1;
        if (val(l, "fabric_status", b, sizeof b)) g->fabric_status = errcode(b);
        g->clique = (u32)num(l, "clique", (long)g->clique);
        g->health = (u32)num(l, "health", (long)g->health);
        g->health_summary = (unsigned char)num(l, "health_summary", g->health_summary);
        if (val(l, "cluster", b, sizeof b)) parse_uuid16(b, g->cluster);
        snprintf(g->pci, sizeof g->pci, "%08X:%02X:%02X.0", g->domain, g->bus, g->dev);
    }
}

static int parse_file(state_t *st, const char *path, int depth) {
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    char *line = NULL, b[512];
    size_t cap = 0;
    while (getline(&line, &cap, f) > 0) {
        int q = 0;
        for (char *p = line; *p; p++) {
            if (*p == '"') q = !q;
            if (*p == '#' && !q) { *p = 0; break; }
        }
        size_t n = strlen(line);
        while (n && isspace((unsigned char)line[n - 1])) line[--n] = 0;
        char *l = line;
        while (isspace((unsigned char)*l)) l++;
        if (!*l) continue;
        char word[64] = "", a1[256] = "", a2[256] = "", a3[256] = "";
        sscanf(l, "%63s %255s %255s %255s", word, a1, a2, a3);
        if (!strcmp(word, "driver")) snprintf(st->driver, sizeof st->driver, "%.79s", a1);
        else if (!strcmp(word, "nvml")) snprintf(st->nvml, sizeof st->nvml, "%.79s", a1);
        else if (!strcmp(word, "branch")) snprintf(st->branch, sizeof st->branch, "%.79s", a1);
        else if (!strcmp(word, "cuda")) st->cuda = atoi(a1);
        else if (!strcmp(word, "empty")) st->empty_ok = !strcmp(a1, "ok");
        else if (!strcmp(word, "gpu")) {
            int from = atoi(a1), to = from;
            char *dash = strchr(a1, '-');
            if (dash) to = atoi(dash + 1);
            check_keys(path, l, GPU_KEYS);
            gpu_line(st, l, from, to);
        } else if (!strcmp(word, "mig") && st->nmig < MAX_MIG) {
            check_keys(path, l, MIG_KEYS);
            mig_t *m = &st->mig[st->nmig++];
            memset(m, 0, sizeof *m);
            m->magic = 'M'; m->present = 1;
            m->gpu = (u32)num(l, "gpu", 0); m->index = (u32)num(l, "index", 0);
            m->gi = (u32)num(l, "gi", 0); m->ci = (u32)num(l, "ci", 0);
            m->slices = (u32)num(l, "slices", 1); m->sms = (u32)num(l, "sms", 16);
            if (val(l, "total", b, sizeof b)) m->total = bytes(b, 1ULL << 20);
            if (val(l, "reserved", b, sizeof b)) m->reserved = bytes(b, 1ULL << 20);
            if (val(l, "used", b, sizeof b)) m->base_used = bytes(b, 1ULL << 20);
            if (val(l, "name", b, sizeof b)) snprintf(m->name, sizeof m->name, "%.95s", b);
            if (val(l, "uuid", b, sizeof b)) snprintf(m->uuid, sizeof m->uuid, "%.95s", b);
            else snprintf(m->uuid, sizeof m->uuid, "MIG-00000000-0000-0000-%04u-%012u", m->gpu, m->index);
        } else if (!strcmp(word, "proc") && st->nproc < MAX_PROC) {
            check_keys(path, l, PROC_KEYS);
            proc_t *p = &st->proc[st->nproc++];
            p->gpu = (int)num(l, "gpu", 0); p->pid = (u32)num(l, "pid", 0);
            p->gi = (u32)num(l, "gi", -1); p->ci = (u32)num(l, "ci", -1);
            p->bytes = val(l, "mib", b, sizeof b) ? bytes(b, 1ULL << 20) : 0;
            p->type = val(l, "type", b, sizeof b) ? (char)toupper(*b) : 'C';
            p->after = (int)num(l, "after", 0);
        } else if (!strcmp(word, "procdir")) {
            if (val(l, "path", b, sizeof b)) snprintf(st->procdir, sizeof st->procdir, "%s", b);     /* path="..." may hold spaces */
            else snprintf(st->procdir, sizeof st->procdir, "%.255s", a1);
            st->procdir_prune = num(l, "prune", 1) != 0;
        } else if (!strcmp(word, "topo")) {
            int a = atoi(a1), c = atoi(a2);
            if (a >= 0 && a < MAX_GPU && c >= 0 && c < MAX_GPU) st->topo[a][c] = st->topo[c][a] = (signed char)level(a3);
        } else if (!strcmp(word, "nvlink")) {
            int g = (int)num(l, "gpu", -1), k = (int)num(l, "link", -1);
            if (g >= 0 && g < MAX_GPU && k >= 0 && k < MAX_LINK) {
                if (val(l, "state", b, sizeof b)) st->gpu[g].link_state[k] = (signed char)atoi(b);
                if (val(l, "remote", b, sizeof b)) snprintf(st->gpu[g].link_pci[k], 32, "%.31s", b);
            }
        } else if ((!strcmp(word, "error") || !strcmp(word, "delay")) && st->nrule < MAX_RULE) {
            check_keys(path, l, RULE_KEYS);
            rule_t *r = &st->rule[st->nrule++];
            snprintf(r->pat, sizeof r->pat, "%.95s", a1);
            r->is_delay = *word == 'd';
            if (r->is_delay) r->ms = atoi(a2); else r->code = errcode(a2);
            r->gpu = (int)num(l, "gpu", -1);
            r->times = (int)num(l, "times", -1);
            r->after = (int)num(l, "after", 0);
        } else if (!strcmp(word, "include") && depth < 4) {
            char path2[800];
            if (*a1 == '/') snprintf(path2, sizeof path2, "%s", a1);
            else {
                snprintf(path2, sizeof path2, "%.500s", path);
                char *sl = strrchr(path2, '/');
                snprintf(sl ? sl + 1 : path2, 256, "%.255s", a1);
            }
            parse_file(st, path2, depth + 1);
        } else if (getenv("FAKE_NVML_STRICT"))
            fprintf(stderr, "fake_nvml: %s: not understood: %s\n", path, l);
    }
    free(line);
    fclose(f);
    return 1;
}

static const char *state_path(void) {
    const char *p = getenv("FAKE_NVML_STATE");
    return p && *p ? p : FAKE_NVML_DEFAULT_STATE;
}

static int parse(state_t *st) {
    memset(st, 0, sizeof *st);
    memset(st->topo, -1, sizeof st->topo);
    strcpy(st->driver, "580.95.05");
    st->cuda = 13000;
    if (!parse_file(st, state_path(), 0)) return 0;
    st->nstatic = st->nproc;
    if (!*st->nvml) snprintf(st->nvml, sizeof st->nvml, "%d.%.70s", st->cuda / 1000, st->driver);
    if (!*st->branch) snprintf(st->branch, sizeof st->branch, "r%.3s_00", st->driver);
    return 1;
}

/* the driver frees what a process held when it exits, also while nobody has reaped it yet */
static int gone(u32 pid) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f) return kill((pid_t)pid, 0) && errno == ESRCH;
    char *got = fgets(line, sizeof line, f);
    fclose(f);
    char *paren = got ? strrchr(line, ')') : NULL;
    return paren && (paren[2] == 'Z' || paren[2] == 'X');
}

/* the first word of a line in the process directory: a GPU's index or UUID, or a MIG device's UUID */
static int which_gpu(const state_t *st, const char *word, long *gi, long *ci) {
    char *end;
    long index = strtol(word, &end, 10);
    if (!*end) return (int)index;
    for (int i = 0; i < st->ngpu; i++) if (st->gpu[i].present && !strcasecmp(st->gpu[i].uuid, word)) return i;
    for (int i = 0; i < st->nmig; i++) if (!strcasecmp(st->mig[i].uuid, word)) {
        *gi = (long)st->mig[i].gi;
        *ci = (long)st->mig[i].ci;
        return (int)st->mig[i].gpu;
    }
    if (getenv("FAKE_NVML_STRICT")) fprintf(stderr, "fake_nvml: %s: no such GPU: %s\n", st->procdir, word);
    return -1;
}

/* processes that registered themselves: one file per pid, lines "GPU MIB [TYPE [GI CI]]" */
static void read_procdir(state_t *st) {
    st->nproc = st->nstatic;
    if (!*st->procdir) return;
    DIR *d = opendir(st->procdir);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        char *end;
        u32 pid = (u32)strtoul(e->d_name, &end, 10);
        if (*end || end == e->d_name) continue;             /* a file being written under another name */
        if (st->procdir_prune && gone(pid)) continue;
        char path[800], line[256];
        snprintf(path, sizeof path, "%s/%s", st->procdir, e->d_name);
        FILE *f = fopen(path, "re");
        if (!f) continue;
        while (fgets(line, sizeof line, f) && st->nproc < MAX_PROC) {
            char gpu[128], mib[64], type[8] = "C";
            long gi = -1, ci = -1, own_gi = -1, own_ci = -1;
            if (*line == '#' || sscanf(line, "%127s %63s %7s %ld %ld", gpu, mib, type, &own_gi, &own_ci) < 2) continue;
            int g = which_gpu(st, gpu, &gi, &ci);
            if (g < 0) continue;
            proc_t *p = &st->proc[st->nproc++];
            p->gpu = g; p->pid = pid; p->bytes = bytes(mib, 1ULL << 20); p->type = (char)toupper(*type); p->after = 0;
            p->gi = (u32)(own_gi >= 0 ? own_gi : gi); p->ci = (u32)(own_ci >= 0 ? own_ci : ci);
        }
        fclose(f);
    }
    closedir(d);
}

/* what may change while the library is in use: the rest stays as it was at nvmlInit */
static void take_over(void) {
    memcpy(S.proc, T.proc, sizeof S.proc);
    S.nproc = S.nstatic = T.nstatic;
    memcpy(S.rule, T.rule, sizeof S.rule);
    S.nrule = T.nrule;
    memcpy(S.procdir, T.procdir, sizeof S.procdir);
    S.procdir_prune = T.procdir_prune;
    for (int i = 0; i < S.ngpu && i < T.ngpu; i++) {
        S.gpu[i].base_used = T.gpu[i].base_used;
        S.gpu[i].lost = T.gpu[i].lost;
        S.gpu[i].fabric = T.gpu[i].fabric;
        S.gpu[i].fabric_status = T.gpu[i].fabric_status;
        S.gpu[i].health = T.gpu[i].health;
        S.gpu[i].health_summary = T.gpu[i].health_summary;
        S.gpu[i].util_gpu = T.gpu[i].util_gpu;
        S.gpu[i].util_mem = T.gpu[i].util_mem;
        S.gpu[i].ecc_corrected = T.gpu[i].ecc_corrected;
        S.gpu[i].ecc_uncorrected = T.gpu[i].ecc_uncorrected;
        S.gpu[i].rows_corrected = T.gpu[i].rows_corrected;
        S.gpu[i].rows_uncorrected = T.gpu[i].rows_uncorrected;
        S.gpu[i].rows_pending = T.gpu[i].rows_pending;
        S.gpu[i].rows_failure = T.gpu[i].rows_failure;
        S.gpu[i].retired_pending = T.gpu[i].retired_pending;
        S.gpu[i].recovery = T.gpu[i].recovery;
        memcpy(S.gpu[i].link_state, T.gpu[i].link_state, sizeof S.gpu[i].link_state);
    }
}

static int unread;              /* the process directory was not read since this call began */

static void refresh(void) {
    struct stat st;
    int changed = stat(state_path(), &st) == 0 &&
        (st.st_ino != last_st.st_ino || st.st_size != last_st.st_size ||
         st.st_mtim.tv_sec != last_st.st_mtim.tv_sec || st.st_mtim.tv_nsec != last_st.st_mtim.tv_nsec);
    if (changed && parse(&T)) {
        last_st = st;
        take_over();
    }
    unread = 1;
}

/* only calls that tell of processes or memory open the files of the process directory: the others would pay for them, too */
static void look_at_processes(void) {
    if (unread) read_procdir(&S);
    unread = 0;
}

static void trace(const char *fn, int gpu, int code) {
    const char *t = getenv("FAKE_NVML_TRACE");
    if (!t || !*t) return;
    FILE *f = fopen(t, "ae");
    if (!f) return;
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    fprintf(f, "%ld.%03ld pid=%d %s gpu=%d -> %d\n", (long)ts.tv_sec, ts.tv_nsec / 1000000, getpid(), fn, gpu, code);
    fclose(f);
}

static count_t *counter(const rule_t *r) {
    char key[160];
    snprintf(key, sizeof key, "%s/%d/%d/%d/%d/%d", r->pat, r->code, r->gpu, r->is_delay, r->times, r->after);
    for (int i = 0; i < nC; i++) if (!strcmp(C[i].key, key)) return &C[i];
    if (nC >= MAX_RULE) return &C[MAX_RULE - 1];
    strcpy(C[nC].key, key);
    return &C[nC++];
}

/* injected delays and errors */
static int injected(const char *fn, int gpu) {
    int code = OK;
    for (int i = 0; i < S.nrule && !code; i++) {
        rule_t *r = &S.rule[i];
        if (fnmatch(r->pat, fn, 0) || (r->gpu >= 0 && r->gpu != gpu)) continue;
        count_t *c = counter(r);
        if (c->calls++ < r->after) continue;
        if (r->times >= 0 && c->fired >= r->times) continue;
        c->fired++;
        if (r->is_delay) {
            int ms = r->ms;
            pthread_mutex_unlock(&L);
            struct timespec ts = {ms / 1000, (ms % 1000) * 1000000L};
            nanosleep(&ts, NULL);
            pthread_mutex_lock(&L);
        } else code = r->code;
    }
    return code;
}

/* handles point into S; a stale or foreign pointer is an invalid argument */
static gpu_t *as_gpu(void *h) {
    for (int i = 0; i < S.ngpu; i++) if (h == &S.gpu[i] && S.gpu[i].present) return &S.gpu[i];
    return NULL;
}
static mig_t *as_mig(void *h) {
    for (int i = 0; i < S.nmig; i++) if (h == &S.mig[i]) return &S.mig[i];
    return NULL;
}
static gpu_t *parent(void *h) {
    mig_t *m = as_mig(h);
    return m ? (m->gpu < (u32)S.ngpu ? &S.gpu[m->gpu] : NULL) : as_gpu(h);
}

#define LEAVE(c) do { rc = (c); goto out; } while (0)
#define BEGIN(h_) \
    static const char *fn = NULL; if (!fn) fn = __func__; \
    ret_t rc = OK; int gi_ = -1; void *h = (void *)(h_); (void)h; \
    pthread_mutex_lock(&L); \
    if (!refs) LEAVE(UNINITIALIZED); \
    refresh();
#define DEVICE \
    gpu_t *g = parent(h); mig_t *m = as_mig(h); (void)m; \
    if (!g) LEAVE(INVALID_ARGUMENT); \
    gi_ = (int)g->index; \
    if ((rc = injected(fn, gi_))) goto out; \
    if (g->lost) LEAVE(GPU_IS_LOST);
#define NODEVICE if ((rc = injected(fn, -1))) goto out;
#define NOMIG if (m) LEAVE(INVALID_ARGUMENT);
#define END out: trace(fn, gi_, rc); pthread_mutex_unlock(&L); return rc;

static int put(char *dst, u32 n, const char *src) {
    if (!dst) return INVALID_ARGUMENT;
    if (strlen(src) + 1 > n) return INSUFFICIENT_SIZE;
    strcpy(dst, src);
    return OK;
}

/* ------------------------------------------------------------ init, system */

static ret_t do_init(const char *fn, u32 flags) {
    ret_t rc = OK;
    pthread_mutex_lock(&L);
    if (!refs) {
        if (!parse(&T)) { rc = DRIVER_NOT_LOADED; goto out; }     /* no state file: no driver */
        memcpy(&S, &T, sizeof S);
        if (stat(state_path(), &last_st)) memset(&last_st, 0, sizeof last_st);
        read_procdir(&S);
        list_calls = 0;
        /* "error nvmlInit CODE" stands for every way to initialise */
        rc = injected(fn, -1);
        if (!rc && strcmp(fn, "nvmlInit")) {
            for (int i = 0; i < S.nrule; i++) if (!strcmp(S.rule[i].pat, "nvmlInit")) { rc = injected("nvmlInit", -1); break; }
        }
        if (!rc && !S.ngpu && !S.empty_ok && !(flags & 1)) rc = NOT_FOUND;
        if (rc) goto out;
    }
    refs++;
out:
    trace(fn, -1, rc);
    pthread_mutex_unlock(&L);
    return rc;
}
API ret_t nvmlInit(void) { return do_init("nvmlInit", 0); }
API ret_t nvmlInit_v2(void) { return do_init("nvmlInit_v2", 0); }
API ret_t nvmlInitWithFlags(u32 flags) { return do_init("nvmlInitWithFlags", flags); }
API ret_t nvmlShutdown(void) {
    pthread_mutex_lock(&L);
    ret_t rc = refs ? OK : UNINITIALIZED;
    if (refs) refs--;
    trace("nvmlShutdown", -1, rc);
    pthread_mutex_unlock(&L);
    return rc;
}
API const char *nvmlErrorString(ret_t e) {
    for (size_t i = 0; i < NERRORS; i++) if (ERRORS[i].code == e) return ERRORS[i].text;
    return "Unknown Error";
}
API ret_t nvmlSystemGetDriverVersion(char *v, u32 n) { BEGIN(NULL) NODEVICE rc = put(v, n, S.driver); END }
API ret_t nvmlSystemGetNVMLVersion(char *v, u32 n) { BEGIN(NULL) NODEVICE rc = put(v, n, S.nvml); END }
API ret_t nvmlSystemGetCudaDriverVersion(int *v) { BEGIN(NULL) NODEVICE if (!v) LEAVE(INVALID_ARGUMENT); *v = S.cuda; END }
API ret_t nvmlSystemGetCudaDriverVersion_v2(int *v) { BEGIN(NULL) NODEVICE if (!v) LEAVE(INVALID_ARGUMENT); *v = S.cuda; END }
API ret_t nvmlSystemGetDriverBranch(void *info, u32 n) {
    BEGIN(NULL) NODEVICE
    struct { u32 version; char branch[80]; } *o = info;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (o->version != (u32)(sizeof *o | 1u << 24)) LEAVE(VERSION_MISMATCH);
    rc = put(o->branch, n < 80 ? n : 80, S.branch);
    END
}
API ret_t nvmlSystemGetProcessName(u32 pid, char *name, u32 n) {
    BEGIN(NULL) NODEVICE
    if (!name || !n) LEAVE(INVALID_ARGUMENT);
    char path[64], b[1024];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *f = fopen(path, "re");
    if (!f) LEAVE(NOT_FOUND);
    size_t k = fread(b, 1, sizeof b - 1, f);
    fclose(f);
    b[k] = 0;                                /* argv[0]; the driver truncates, it does not fail */
    snprintf(name, n, "%s", b);
    END
}

/* ---------------------------------------------------------------- handles */

static int visible_count(void) {
    int n = 0;
    for (int i = 0; i < S.ngpu; i++) n += S.gpu[i].present;
    return n;
}
API ret_t nvmlDeviceGetCount_v2(u32 *n) { BEGIN(NULL) NODEVICE if (!n) LEAVE(INVALID_ARGUMENT); *n = (u32)visible_count(); END }
API ret_t nvmlDeviceGetCount(u32 *n) {
    BEGIN(NULL) NODEVICE
    if (!n) LEAVE(INVALID_ARGUMENT);
    *n = 0;
    for (int i = 0; i < S.ngpu; i++) *n += S.gpu[i].present && !S.gpu[i].hidden && !S.gpu[i].lost;
    END
}
static ret_t give(gpu_t *g, const char *fn, void **out) {
    ret_t rc = injected(fn, (int)g->index);
    if (rc) return rc;
    if (g->lost) return GPU_IS_LOST;
    if (g->hidden) return NO_PERMISSION;
    *out = g;
    return OK;
}
API ret_t nvmlDeviceGetHandleByIndex_v2(u32 i, void **d) {
    BEGIN(NULL)
    if (!d || i >= (u32)S.ngpu || !S.gpu[i].present) LEAVE(INVALID_ARGUMENT);
    gi_ = (int)i;
    rc = give(&S.gpu[i], fn, d);
    END
}
API ret_t nvmlDeviceGetHandleByIndex(u32 i, void **d) { return nvmlDeviceGetHandleByIndex_v2(i, d); }
static ret_t by_uuid(const char *fn, const char *uuid, void **d, int *gi_) {
    for (int i = 0; i < S.ngpu; i++) if (!strcmp(S.gpu[i].uuid, uuid)) { *gi_ = i; return give(&S.gpu[i], fn, d); }
    for (int i = 0; i < S.nmig; i++) if (!strcmp(S.mig[i].uuid, uuid)) { *gi_ = (int)S.mig[i].gpu; *d = &S.mig[i]; return injected(fn, *gi_); }
    ret_t rc = injected(fn, -1);
    return rc ? rc : NOT_FOUND;
}
API ret_t nvmlDeviceGetHandleByUUID(const char *uuid, void **d) {
    BEGIN(NULL)
    if (!uuid || !d) LEAVE(INVALID_ARGUMENT);
    rc = by_uuid(fn, uuid, d, &gi_);
    END
}
API ret_t nvmlDeviceGetHandleByUUIDV(const void *u, void **d) {
    BEGIN(NULL)
    const struct { u32 version, type; union { char str[41]; unsigned char bin[16]; } v; } *q = u;
    if (!q || !d) LEAVE(INVALID_ARGUMENT);
    if (q->version != 0x1000034) LEAVE(VERSION_MISMATCH);
    if (q->type == 1) rc = by_uuid(fn, q->v.str, d, &gi_);
    else if (q->type == 2) {
        rc = NOT_FOUND;
        for (int i = 0; i < S.ngpu; i++) {
            unsigned char b[16] = {0};
            parse_uuid16(S.gpu[i].uuid + 4, b);
            if (!memcmp(b, q->v.bin, 16)) { gi_ = i; rc = give(&S.gpu[i], fn, d); break; }
        }
    } else rc = INVALID_ARGUMENT;
    END
}
API ret_t nvmlDeviceGetHandleBySerial(const char *s, void **d) {
    BEGIN(NULL)
    if (!s || !d) LEAVE(INVALID_ARGUMENT);
    rc = NOT_FOUND;
    for (int i = 0; i < S.ngpu; i++) if (*S.gpu[i].serial && !strcmp(S.gpu[i].serial, s)) { gi_ = i; rc = give(&S.gpu[i], fn, d); break; }
    END
}
API ret_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) {
    BEGIN(NULL)
    u32 a, b, c;
    if (!id || !d || !parse_pci(id, &a, &b, &c)) LEAVE(INVALID_ARGUMENT);
    rc = NOT_FOUND;
    for (int i = 0; i < S.ngpu; i++)
        if (S.gpu[i].present && S.gpu[i].domain == a && S.gpu[i].bus == b && S.gpu[i].dev == c) { gi_ = i; rc = give(&S.gpu[i], fn, d); break; }
    END
}
API ret_t nvmlDeviceGetHandleByPciBusId(const char *id, void **d) { return nvmlDeviceGetHandleByPciBusId_v2(id, d); }

/* --------------------------------------------------------------- identity */

API ret_t nvmlDeviceGetName(void *h_, char *b, u32 n) {
    BEGIN(h_) DEVICE
    char t[200];
    if (m && *m->name) snprintf(t, sizeof t, "%s", m->name);
    else if (m) snprintf(t, sizeof t, "%s MIG %ug.%llugb", g->name, m->slices, (m->total + (1ULL << 29)) >> 30);
    else snprintf(t, sizeof t, "%s", g->name);
    t[95] = 0;
    rc = put(b, n, t);
    END
}
API ret_t nvmlDeviceGetUUID(void *h_, char *b, u32 n) { BEGIN(h_) DEVICE rc = put(b, n, m ? m->uuid : g->uuid); END }
API ret_t nvmlDeviceGetSerial(void *h_, char *b, u32 n) { BEGIN(h_) DEVICE if (!*g->serial) LEAVE(NOT_SUPPORTED); rc = put(b, n, g->serial); END }
API ret_t nvmlDeviceGetBoardPartNumber(void *h_, char *b, u32 n) { BEGIN(h_) DEVICE if (!*g->part) LEAVE(NOT_SUPPORTED); rc = put(b, n, g->part); END }
#define GETU32(fname, expr) API ret_t fname(void *h_, u32 *o) { BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); *o = (u32)(expr); END }
GETU32(nvmlDeviceGetIndex, m ? m->index : g->index)
GETU32(nvmlDeviceGetMinorNumber, g->minor)
GETU32(nvmlDeviceGetBoardId, g->board)
GETU32(nvmlDeviceGetModuleId, g->module)
GETU32(nvmlDeviceGetMultiGpuBoard, 0)
GETU32(nvmlDeviceGetPersistenceMode, g->persistence)
GETU32(nvmlDeviceGetComputeMode, g->compute_mode)
GETU32(nvmlDeviceGetArchitecture, g->arch)
API ret_t nvmlDeviceGetCudaComputeCapability(void *h_, int *a, int *b) {
    BEGIN(h_) DEVICE if (!a || !b) LEAVE(INVALID_ARGUMENT); *a = g->cc_major; *b = g->cc_minor; END
}
API ret_t nvmlDeviceGetEccMode(void *h_, u32 *a, u32 *b) {
    BEGIN(h_) DEVICE
    if (!a || !b) LEAVE(INVALID_ARGUMENT);
    if (g->ecc < 0) LEAVE(NOT_SUPPORTED);
    *a = (u32)g->ecc; *b = (u32)g->ecc_pending;
    END
}
API ret_t nvmlDeviceGetNumaNodeId(void *h_, u32 *o) {       /* only where the GPU memory itself is a NUMA node */
    BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); if (g->gpu_numa < 0) LEAVE(NOT_SUPPORTED); *o = (u32)g->gpu_numa; END
}
API ret_t nvmlDeviceGetAddressingMode(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u32 version, value; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (o->version != 0x1000008) LEAVE(VERSION_MISMATCH);
    o->value = (u32)g->addressing;
    END
}
API ret_t nvmlDeviceGetUtilizationRates(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u32 gpu, memory; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (m || g->mig) LEAVE(NOT_SUPPORTED);
    o->gpu = g->util_gpu; o->memory = g->util_mem;
    END
}

/* -------------------------------------------------------------------- PCI */

typedef struct { char legacy[16]; u32 domain, bus, device, devid, subsys; char id[32]; } pci_t;
static void fill_pci(pci_t *o, const char *id, u32 devid, u32 subsys) {
    memset(o, 0, sizeof *o);
    parse_pci(id, &o->domain, &o->bus, &o->device);
    snprintf(o->legacy, sizeof o->legacy, "%04X:%02X:%02X.0", o->domain & 0xffff, o->bus & 0xff, o->device & 0x1f);
    snprintf(o->id, sizeof o->id, "%08X:%02X:%02X.0", o->domain, o->bus, o->device);
    o->devid = devid; o->subsys = subsys;
}
API ret_t nvmlDeviceGetPciInfo_v3(void *h_, pci_t *o) {
    BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); fill_pci(o, g->pci, g->devid, g->subsys); END
}
API ret_t nvmlDeviceGetPciInfo_v2(void *h_, void *p) {     /* older layout: no long bus id */
    BEGIN(h_) DEVICE
    if (!p) LEAVE(INVALID_ARGUMENT);
    pci_t t;
    fill_pci(&t, g->pci, g->devid, g->subsys);
    memcpy(p, &t, 36);
    END
}
API ret_t nvmlDeviceGetPciInfo(void *h_, pci_t *o) { return nvmlDeviceGetPciInfo_v3(h_, o); }
API ret_t nvmlDeviceGetPciInfoExt(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u32 version, domain, bus, device, devid, subsys, base, sub; char id[32]; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (o->version != 0x1000040) LEAVE(VERSION_MISMATCH);
    o->domain = g->domain; o->bus = g->bus; o->device = g->dev; o->devid = g->devid; o->subsys = g->subsys;
    o->base = 3; o->sub = 2;
    snprintf(o->id, sizeof o->id, "%s", g->pci);
    END
}

/* ----------------------------------------------------------------- memory */

static int mine(const proc_t *p, const gpu_t *g, const mig_t *m) {
    return p->after <= list_calls && p->gpu == (int)g->index && (!m || (p->gi == m->gi && p->ci == m->ci));
}
static u64 held(const gpu_t *g, const mig_t *m) {
    u64 s = m ? m->base_used : g->base_used;
    look_at_processes();
    for (int i = 0; i < S.nproc; i++) if (mine(&S.proc[i], g, m) && S.proc[i].bytes != NA64) s += S.proc[i].bytes;
    return s;
}
static void mem(const gpu_t *g, const mig_t *m, u64 *total, u64 *reserved, u64 *free_, u64 *used) {
    *total = m ? m->total : g->total;
    *reserved = m ? m->reserved : g->reserved;
    *used = held(g, m);
    if (*used > *total - *reserved) *used = *total - *reserved;
    *free_ = *total - *reserved - *used;
}
API ret_t nvmlDeviceGetMemoryInfo(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u64 total, free_, used; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (!g->memory_supported) LEAVE(NOT_SUPPORTED);
    u64 r, u;
    mem(g, m, &o->total, &r, &o->free_, &u);
    o->used = u + r;                          /* v1: "used" includes the reserved part */
    END
}
API ret_t nvmlDeviceGetMemoryInfo_v2(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u32 version; u64 total, reserved, free_, used; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (o->version != 0x2000028) LEAVE(VERSION_MISMATCH);
    if (!g->memory_supported) LEAVE(NOT_SUPPORTED);
    mem(g, m, &o->total, &o->reserved, &o->free_, &o->used);
    END
}
API ret_t nvmlDeviceGetBAR1MemoryInfo(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u64 total, free_, used; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (!g->memory_supported) LEAVE(NOT_SUPPORTED);
    o->total = g->bar1; o->used = 1ULL << 20; o->free_ = g->bar1 - o->used;
    END
}

/* -------------------------------------------------------------- processes */

typedef struct { u32 pid; u64 bytes; } proc1_t;
typedef struct { u32 pid; u64 bytes; u32 gi, ci; } proc2_t;
static ret_t list(void *h, const char *fn, int *gi_, char type, int v1, u32 *count, void *infos) {
    gpu_t *g = parent(h);
    mig_t *m = as_mig(h);
    if (!g || !count) return INVALID_ARGUMENT;
    *gi_ = (int)g->index;
    ret_t rc = injected(fn, *gi_);
    if (rc) return rc;
    if (g->lost) return GPU_IS_LOST;
    u32 need = 0;
    look_at_processes();
    for (int i = 0; i < S.nproc; i++) need += S.proc[i].type == type && mine(&S.proc[i], g, m);
    u32 room = *count;
    if (room && !infos) return INVALID_ARGUMENT;
    *count = need;
    if (room < need) { list_calls++; return INSUFFICIENT_SIZE; }
    u32 k = 0;
    for (int i = 0; i < S.nproc; i++) {
        proc_t *p = &S.proc[i];
        if (p->type != type || !mine(p, g, m)) continue;
        if (v1) { proc1_t *o = &((proc1_t *)infos)[k++]; o->pid = p->pid; o->bytes = p->bytes; }
        else {
            proc2_t *o = &((proc2_t *)infos)[k++];
            memset(o, 0, sizeof *o);
            o->pid = p->pid; o->bytes = p->bytes;
            o->gi = g->mig ? p->gi : NA32; o->ci = g->mig ? p->ci : NA32;
        }
    }
    list_calls++;
    return OK;
}
#define PROCS(fname, type, v1) API ret_t fname(void *h_, u32 *n, void *o) { BEGIN(h_) rc = list(h, fn, &gi_, type, v1, n, o); END }
PROCS(nvmlDeviceGetComputeRunningProcesses, 'C', 1)
PROCS(nvmlDeviceGetComputeRunningProcesses_v2, 'C', 0)
PROCS(nvmlDeviceGetComputeRunningProcesses_v3, 'C', 0)
PROCS(nvmlDeviceGetGraphicsRunningProcesses, 'G', 1)
PROCS(nvmlDeviceGetGraphicsRunningProcesses_v2, 'G', 0)
PROCS(nvmlDeviceGetGraphicsRunningProcesses_v3, 'G', 0)
PROCS(nvmlDeviceGetMPSComputeRunningProcesses, 'M', 1)
PROCS(nvmlDeviceGetMPSComputeRunningProcesses_v2, 'M', 0)
PROCS(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'M', 0)
API ret_t nvmlDeviceGetRunningProcessDetailList(void *h_, void *pl) {
    BEGIN(h_) DEVICE
    typedef struct { u32 pid; u64 bytes; u32 gi, ci; u64 cc; } det_t;
    struct { u32 version, mode, n; det_t *a; } *o = pl;
    if (!o || o->mode > 2) LEAVE(INVALID_ARGUMENT);
    if (o->version != 0x1000018) LEAVE(VERSION_MISMATCH);
    char type = "CGM"[o->mode];
    u32 need = 0, room = o->n, k = 0;
    look_at_processes();
    for (int i = 0; i < S.nproc; i++) need += S.proc[i].type == type && mine(&S.proc[i], g, m);
    if (room && !o->a) LEAVE(INVALID_ARGUMENT);
    o->n = need;
    if (room < need) LEAVE(INSUFFICIENT_SIZE);
    for (int i = 0; i < S.nproc; i++) {
        proc_t *p = &S.proc[i];
        if (p->type != type || !mine(p, g, m)) continue;
        det_t *d = &o->a[k++];
        d->pid = p->pid; d->bytes = p->bytes; d->gi = g->mig ? p->gi : NA32; d->ci = g->mig ? p->ci : NA32; d->cc = 0;
    }
    END
}

/* -------------------------------------------------------------------- MIG */

API ret_t nvmlDeviceGetMigMode(void *h_, u32 *cur, u32 *pend) {
    BEGIN(h_) DEVICE
    if (!cur || !pend) LEAVE(INVALID_ARGUMENT);
    NOMIG
    if (!g->mig_capable) LEAVE(NOT_SUPPORTED);
    *cur = (u32)g->mig; *pend = (u32)g->mig_pending;
    END
}
API ret_t nvmlDeviceIsMigDeviceHandle(void *h_, u32 *o) { BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); *o = m != NULL; END }
API ret_t nvmlDeviceGetMaxMigDeviceCount(void *h_, u32 *o) {
    BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); *o = g->mig_capable ? 7 : 0; END
}
API ret_t nvmlDeviceGetMigDeviceHandleByIndex(void *h_, u32 idx, void **o) {
    BEGIN(h_) DEVICE
    if (!o || m || idx >= 7) LEAVE(INVALID_ARGUMENT);
    if (!g->mig_capable) LEAVE(NOT_SUPPORTED);
    rc = NOT_FOUND;
    for (int i = 0; g->mig && i < S.nmig; i++) if (S.mig[i].gpu == g->index && S.mig[i].index == idx) { *o = &S.mig[i]; rc = OK; break; }
    END
}
API ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h_, void **o) {
    BEGIN(h_) DEVICE if (!o || !m) LEAVE(INVALID_ARGUMENT); *o = g; END
}
API ret_t nvmlDeviceGetGpuInstanceId(void *h_, u32 *o) { BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); if (!m) LEAVE(NOT_SUPPORTED); *o = m->gi; END }
API ret_t nvmlDeviceGetComputeInstanceId(void *h_, u32 *o) { BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); if (!m) LEAVE(NOT_SUPPORTED); *o = m->ci; END }
API ret_t nvmlDeviceGetAttributes_v2(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u32 sm, copy, dec, enc, jpeg, ofa, gis, cis; u64 mb; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (!m) LEAVE(NOT_SUPPORTED);
    memset(o, 0, sizeof *o);
    o->sm = m->sms; o->copy = 1; o->gis = m->slices; o->cis = m->slices; o->mb = m->total >> 20;
    END
}

/* ----------------------------------------------------- affinity, topology */

static void cpuset(const char *s, unsigned long *set, u32 n) {
    memset(set, 0, n * sizeof *set);
    while (*s) {
        char *e;
        long a = strtol(s, &e, 10), b = a;
        if (e == s) break;
        if (*e == '-') b = strtol(e + 1, &e, 10);
        for (long c = a; c <= b; c++) if ((u32)(c / 64) < n) set[c / 64] |= 1UL << (c % 64);
        s = *e == ',' ? e + 1 : e;
    }
}
API ret_t nvmlDeviceGetCpuAffinity(void *h_, u32 n, unsigned long *set) {
    BEGIN(h_) DEVICE if (!n || !set) LEAVE(INVALID_ARGUMENT); if (!*g->cpus) LEAVE(NOT_SUPPORTED); cpuset(g->cpus, set, n); END
}
API ret_t nvmlDeviceGetCpuAffinityWithinScope(void *h_, u32 n, unsigned long *set, u32 scope) {
    BEGIN(h_) DEVICE if (!n || !set || scope > 1) LEAVE(INVALID_ARGUMENT); if (!*g->cpus) LEAVE(NOT_SUPPORTED); cpuset(g->cpus, set, n); END
}
API ret_t nvmlDeviceGetMemoryAffinity(void *h_, u32 n, unsigned long *set, u32 scope) {
    BEGIN(h_) DEVICE
    if (!n || !set || scope > 1) LEAVE(INVALID_ARGUMENT);
    if (g->numa < 0) LEAVE(NOT_SUPPORTED);
    memset(set, 0, n * sizeof *set);
    if ((u32)(g->numa / 64) < n) set[g->numa / 64] |= 1UL << (g->numa % 64);
    END
}
static int common(int a, int b) {
    if (a == b) return 0;
    if (S.topo[a][b] >= 0) return S.topo[a][b];
    return S.gpu[a].numa == S.gpu[b].numa ? 40 : 50;
}
API ret_t nvmlDeviceGetTopologyCommonAncestor(void *h_, void *h2, u32 *o) {
    BEGIN(h_) DEVICE
    gpu_t *g2 = as_gpu(h2);
    if (!g2 || !o) LEAVE(INVALID_ARGUMENT);
    *o = (u32)common((int)g->index, (int)g2->index);
    END
}
API ret_t nvmlDeviceGetTopologyNearestGpus(void *h_, u32 lvl, u32 *n, void **arr) {
    BEGIN(h_) DEVICE
    if (!n || (*n && !arr)) LEAVE(INVALID_ARGUMENT);
    u32 room = *n, k = 0;
    for (int i = 0; i < S.ngpu; i++)
        if (S.gpu[i].present && i != (int)g->index && common((int)g->index, i) == (int)lvl) { if (k < room) arr[k] = &S.gpu[i]; k++; }
    *n = room && room < k ? room : k;
    END
}
API ret_t nvmlSystemGetTopologyGpuSet(u32 cpu, u32 *n, void **arr) {
    BEGIN(NULL) NODEVICE
    if (!n || (*n && !arr)) LEAVE(INVALID_ARGUMENT);
    u32 room = *n, k = 0;
    for (int i = 0; i < S.ngpu; i++) {
        unsigned long set[16];
        cpuset(S.gpu[i].cpus, set, 16);
        if (S.gpu[i].present && cpu < 1024 && set[cpu / 64] >> (cpu % 64) & 1) { if (k < room) arr[k] = &S.gpu[i]; k++; }
    }
    *n = room && room < k ? room : k;
    END
}
API ret_t nvmlDeviceGetP2PStatus(void *h_, void *h2, u32 idx, u32 *o) {
    BEGIN(h_) DEVICE
    gpu_t *g2 = as_gpu(h2);
    if (!g2 || !o || idx > 4) LEAVE(INVALID_ARGUMENT);
    int nv = g->nlinks > 0 && g2->nlinks > 0;
    *o = g == g2 ? 0 : (idx == 2 ? (nv ? 0 : 5) : (nv || common((int)g->index, (int)g2->index) < 50 ? 0 : 3));
    END
}
API ret_t nvmlDeviceOnSameBoard(void *h_, void *h2, int *o) {
    BEGIN(h_) DEVICE
    gpu_t *g2 = as_gpu(h2);
    if (!g2 || !o) LEAVE(INVALID_ARGUMENT);
    *o = g->board == g2->board;
    END
}

/* --------------------------------------------------------- NVLink, fabric */

#define LINK if (m || !g->nlinks) LEAVE(NOT_SUPPORTED); if (link >= (u32)g->nlinks) LEAVE(INVALID_ARGUMENT);
API ret_t nvmlDeviceGetNvLinkState(void *h_, u32 link, u32 *o) {
    BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); LINK *o = g->link_state[link] < 0 ? 1u : (u32)g->link_state[link]; END
}
API ret_t nvmlDeviceGetNvLinkVersion(void *h_, u32 link, u32 *o) {
    BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); LINK *o = (u32)g->nvlink_version; END
}
API ret_t nvmlDeviceGetNvLinkCapability(void *h_, u32 link, u32 cap, u32 *o) {
    BEGIN(h_) DEVICE if (!o || cap > 5) LEAVE(INVALID_ARGUMENT); LINK *o = cap == 0 || cap == 2 || cap == 5; END
}
API ret_t nvmlDeviceGetNvLinkRemoteDeviceType(void *h_, u32 link, u32 *o) {
    BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); LINK *o = (u32)g->nvlink_remote; END
}
API ret_t nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h_, u32 link, pci_t *o) {
    BEGIN(h_) DEVICE
    if (!o) LEAVE(INVALID_ARGUMENT);
    LINK
    if (*g->link_pci[link]) fill_pci(o, g->link_pci[link], 0x22a310de, 0);
    else if (g->nvlink_remote == 2) { char id[32]; snprintf(id, sizeof id, "00000000:%02X:00.0", 0xC0 + link % 4); fill_pci(o, id, 0x22a310de, 0); }
    else rc = NOT_SUPPORTED;
    END
}
API ret_t nvmlDeviceGetNvLinkRemotePciInfo(void *h_, u32 link, pci_t *o) { return nvmlDeviceGetNvLinkRemotePciInfo_v2(h_, link, o); }

API ret_t nvmlDeviceGetGpuFabricInfo(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { unsigned char uuid[16]; int status; u32 clique; unsigned char state; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (g->fabric < 0) LEAVE(NOT_SUPPORTED);
    memcpy(o->uuid, g->cluster, 16); o->status = g->fabric_status; o->clique = g->clique; o->state = (unsigned char)g->fabric;
    END
}
API ret_t nvmlDeviceGetGpuFabricInfoV(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u32 version; unsigned char uuid[16]; int status; u32 clique; unsigned char state; u32 health; unsigned char summary; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (o->version != 0x2000024 && o->version != 0x3000028) LEAVE(VERSION_MISMATCH);
    if (g->fabric < 0) LEAVE(NOT_SUPPORTED);
    memcpy(o->uuid, g->cluster, 16); o->status = g->fabric_status; o->clique = g->clique; o->state = (unsigned char)g->fabric;
    o->health = g->health;
    if (o->version == 0x3000028) o->summary = g->health_summary;
    END
}

/* ----------------------------------------------------------------- health */

API ret_t nvmlDeviceGetTotalEccErrors(void *h_, u32 type, u32 counter, u64 *o) {
    BEGIN(h_) DEVICE
    if (!o || type > 1 || counter > 1) LEAVE(INVALID_ARGUMENT);
    if (g->ecc <= 0) LEAVE(NOT_SUPPORTED);
    *o = type ? g->ecc_uncorrected : g->ecc_corrected;
    END
}
API ret_t nvmlDeviceGetRemappedRows(void *h_, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failure) {
    BEGIN(h_) DEVICE
    if (!corrected || !uncorrected || !pending || !failure) LEAVE(INVALID_ARGUMENT);
    if (m || !g->rows_supported) LEAVE(NOT_SUPPORTED);
    *corrected = g->rows_corrected; *uncorrected = g->rows_uncorrected; *pending = g->rows_pending; *failure = g->rows_failure;
    END
}
static ret_t retired(gpu_t *g, u32 cause, u32 *n, u64 *pages) {
    if (!n || cause > 1) return INVALID_ARGUMENT;
    if (g->retired_sbe < 0) return NOT_SUPPORTED;
    u32 room = *n, need = (u32)(cause ? g->retired_dbe : g->retired_sbe);
    *n = need;
    if (room < need) return INSUFFICIENT_SIZE;
    for (u32 i = 0; pages && i < need; i++) pages[i] = 0x1000ULL * (i + 1);
    return OK;
}
API ret_t nvmlDeviceGetRetiredPages(void *h_, u32 cause, u32 *n, u64 *pages) { BEGIN(h_) DEVICE rc = retired(g, cause, n, pages); END }
API ret_t nvmlDeviceGetRetiredPages_v2(void *h_, u32 cause, u32 *n, u64 *pages, u64 *times) {
    BEGIN(h_) DEVICE
    rc = retired(g, cause, n, pages);
    for (u32 i = 0; !rc && times && i < *n; i++) times[i] = 0;
    END
}
API ret_t nvmlDeviceGetRetiredPagesPendingStatus(void *h_, u32 *o) {
    BEGIN(h_) DEVICE if (!o) LEAVE(INVALID_ARGUMENT); if (g->retired_sbe < 0) LEAVE(NOT_SUPPORTED); *o = (u32)g->retired_pending; END
}
/* each field answers for itself: the call succeeds although a field is not supported */
typedef struct { u32 id, scope; long long timestamp, latency; u32 type; int ret; union { u32 u; u64 ull; double d; } value; } field_t;
static int field(const gpu_t *g, u32 id, u32 *v) {
    switch (id) {
    case 31: *v = (u32)g->retired_pending; return g->retired_sbe < 0 ? NOT_SUPPORTED : OK;
    case 91: *v = (u32)g->nlinks; return g->nlinks ? OK : NOT_SUPPORTED;
    case 142: *v = g->rows_corrected; return g->rows_supported ? OK : NOT_SUPPORTED;
    case 143: *v = g->rows_uncorrected; return g->rows_supported ? OK : NOT_SUPPORTED;
    case 144: *v = g->rows_pending; return g->rows_supported ? OK : NOT_SUPPORTED;
    case 145: *v = g->rows_failure; return g->rows_supported ? OK : NOT_SUPPORTED;
    case 230: *v = (u32)g->recovery; return g->recovery < 0 ? NOT_SUPPORTED : OK;
    default: return NOT_SUPPORTED;
    }
}
API ret_t nvmlDeviceGetFieldValues(void *h_, int n, field_t *values) {
    BEGIN(h_) DEVICE
    if (n <= 0 || !values) LEAVE(INVALID_ARGUMENT);
    for (int i = 0; i < n; i++) {
        values[i].value.ull = 0;
        values[i].type = 1;                   /* unsigned int */
        values[i].ret = m ? NOT_SUPPORTED : field(g, values[i].id, &values[i].value.u);
    }
    END
}
API ret_t nvmlDeviceGetPlatformInfo(void *h_, void *p) {
    BEGIN(h_) DEVICE
    struct { u32 version; unsigned char ib_guid[16]; char chassis[16]; unsigned char slot, tray, host, peer, module; } *o = p;
    if (!o) LEAVE(INVALID_ARGUMENT);
    if (o->version != 0x200002c) LEAVE(VERSION_MISMATCH);
    if (!*g->chassis) LEAVE(NOT_SUPPORTED);
    memset(o->ib_guid, 0, sizeof o->ib_guid);
    memset(o->chassis, 0, sizeof o->chassis);
    memcpy(o->chassis, g->chassis, strlen(g->chassis) < 16 ? strlen(g->chassis) : 16);
    o->slot = (unsigned char)g->slot; o->tray = (unsigned char)g->tray; o->host = 1; o->peer = 1; o->module = (unsigned char)g->module;
    END
}

/* everything else that a client may ask for: generated names that answer
 * NOT_SUPPORTED (or the injected error) once the library is initialised */
__attribute__((unused)) static ret_t stub(const char *fn) {
    ret_t rc = NOT_SUPPORTED;
    pthread_mutex_lock(&L);
    if (!refs) rc = UNINITIALIZED;
    else { refresh(); int e = injected(fn, -1); if (e) rc = e; }
    trace(fn, -1, rc);
    pthread_mutex_unlock(&L);
    return rc;
}

#define STUB(f) API ret_t f(void) { return stub(#f); }
#include "stubs.inc"

