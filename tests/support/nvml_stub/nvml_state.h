/* What the stub's file says: its lines, read into memory. Included by nvml_stub.c alone. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_GPUS = 128, MAX_PARTS = 8, MAX_PROCESSES = 32, MAX_RULES = 16, TEXT = 96 };
enum { COMPUTE = 0, GRAPHICS = 1 };

typedef unsigned int uint;
typedef unsigned long long ull;

typedef struct { int kind; uint pid; ull memory; } process;
typedef struct { char function[TEXT]; int code; } rule;

/* A GPU or a MIG instance. `has_…` tells whether the file gave the value. */
typedef struct {
    char uuid[TEXT], name[TEXT];
    int has_memory, process_count;
    uint gpu_instance, compute_instance;
    ull total, used, reserved;
    process processes[MAX_PROCESSES];
} part;

typedef struct {
    part whole, parts[MAX_PARTS];
    int part_count, rule_count;
    int has_pci, has_utilisation, has_temperature, has_power, has_limit, has_reasons, has_mig;
    int has_clock[4], has_top_clock[4], has_pcie, has_nvlinks;
    uint domain, bus, slot, utilisation, memory_utilisation, power, limit, clock[4], top_clock[4];
    uint generation, lanes, most_lanes, links, links_up;
    int temperature, mig;
    ull reasons;
    rule rules[MAX_RULES];
} gpu;

static gpu gpus[MAX_GPUS];
static int gpu_count, rule_count;
static rule rules[MAX_RULES];
static char driver[TEXT];
static struct stat seen;

static void copy(char *to, const char *from) { snprintf(to, TEXT, "%s", from); }

static void read_rule(rule *all, int *count, const char *rest) {
    if (*count < MAX_RULES && sscanf(rest, "%95s %d", all[*count].function, &all[*count].code) == 2)
        (*count)++;
}

static void read_process(part *of, const char *rest) {
    char kind[16];
    process *new = &of->processes[of->process_count];
    if (of->process_count < MAX_PROCESSES
        && sscanf(rest, "%15s %u %llu", kind, &new->pid, &new->memory) == 3) {
        new->kind = strcmp(kind, "graphics") ? COMPUTE : GRAPHICS;
        of->process_count++;
    }
}

static void read_clock(int *has, uint *clock, const char *rest) {
    uint type, value;
    if (sscanf(rest, "%u %u", &type, &value) == 2 && type < 4) {
        has[type] = 1;
        clock[type] = value;
    }
}

static void read_gpu_line(gpu *g, part **current, const char *key, const char *rest) {
    part *p = *current;
#define IS(word) (!strcmp(key, word))
    if (IS("mig_instance") && g->part_count < MAX_PARTS) {
        p = *current = &g->parts[g->part_count++];
        sscanf(rest, "%u %u", &p->gpu_instance, &p->compute_instance);
    } else if (IS("uuid")) copy(p->uuid, rest);
    else if (IS("name")) copy(p->name, rest);
    else if (IS("memory"))
        p->has_memory = sscanf(rest, "%llu %llu %llu", &p->total, &p->used, &p->reserved) == 3;
    else if (IS("process")) read_process(p, rest);
    else if (IS("pci")) g->has_pci = sscanf(rest, "%x %x %x", &g->domain, &g->bus, &g->slot) == 3;
    else if (IS("utilisation"))
        g->has_utilisation = sscanf(rest, "%u %u", &g->utilisation, &g->memory_utilisation) == 2;
    else if (IS("temperature")) g->has_temperature = sscanf(rest, "%d", &g->temperature) == 1;
    else if (IS("power")) g->has_power = sscanf(rest, "%u", &g->power) == 1;
    else if (IS("power_limit")) g->has_limit = sscanf(rest, "%u", &g->limit) == 1;
    else if (IS("clock")) read_clock(g->has_clock, g->clock, rest);
    else if (IS("top_clock")) read_clock(g->has_top_clock, g->top_clock, rest);
    else if (IS("reasons")) g->has_reasons = sscanf(rest, "%llu", &g->reasons) == 1;
    else if (IS("pcie"))
        g->has_pcie = sscanf(rest, "%u %u %u", &g->generation, &g->lanes, &g->most_lanes) == 3;
    else if (IS("nvlinks")) g->has_nvlinks = sscanf(rest, "%u %u", &g->links, &g->links_up) == 2;
    else if (IS("mig_mode")) g->has_mig = sscanf(rest, "%d", &g->mig) == 1;
    else if (IS("error")) read_rule(g->rules, &g->rule_count, rest);
}

static void parse(FILE *file) {
    char line[512];
    gpu *g = NULL;
    part *current = NULL;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *rest = strchr(line, ' ');
        if (rest) *rest++ = 0;
        else rest = line + strlen(line);
        if (!strcmp(line, "gpu")) {
            if (gpu_count == MAX_GPUS) break;
            g = &gpus[gpu_count++];
            current = &g->whole;
        } else if (g) read_gpu_line(g, &current, line, rest);
        else if (!strcmp(line, "driver")) copy(driver, rest);
        else if (!strcmp(line, "error")) read_rule(rules, &rule_count, rest);
    }
}

/* Whether there is a file; it is parsed again only when it is another one than last time. */
static int refresh(void) {
    const char *path = getenv("NVML_STUB_STATE");
    struct stat now;
    if (!path || stat(path, &now)) return 0;
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size
        && now.st_mtim.tv_sec == seen.st_mtim.tv_sec
        && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return 1;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    memset(gpus, 0, sizeof gpus);
    gpu_count = rule_count = 0;
    parse(file);
    fclose(file);
    seen = now;
    return 1;
}
