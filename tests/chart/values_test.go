package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const (
	valuesBegin = "<!-- Generated: `make chart-reference` writes what follows from values.yaml and its schema. -->\n"
	valuesEnd   = "<!-- End of the generated part. -->\n"
)

// value is a documented value of the chart.
type value struct{ path, meaning string }

var (
	keyLine   = regexp.MustCompile(`^( *)([A-Za-z]+):`)
	clauseEnd = regexp.MustCompile(`[.;] |, (?:for example|as|from|which|after which|where|by which) `)
)

// documentedValues returns the values of values.yaml that a comment with "# --" documents, in the order of the file.
func documentedValues(t *testing.T) []value {
	t.Helper()
	var found []value
	var parents []string
	meaning := ""
	for _, line := range strings.Split(read(t, chart+"/values.yaml"), "\n") {
		comment, isComment := strings.CutPrefix(strings.TrimSpace(line), "# ")
		if text, isStart := strings.CutPrefix(comment, "-- "); isComment && isStart {
			meaning = text
		} else if isComment && meaning != "" {
			meaning += " " + comment
		} else if key := keyLine.FindStringSubmatch(line); key != nil {
			parents = append(parents[:len(key[1])/2], key[2])
			if meaning != "" {
				found = append(found, value{strings.Join(parents, "."), meaning})
			}
			meaning = ""
		} else {
			meaning = ""
		}
	}
	return found
}

// schema is the part of JSON schema that values.schema.json uses.
type schema struct {
	Ref        string            `json:"$ref"`
	Type       any               `json:"type"` // a name, or a list of names
	Enum       []any             `json:"enum"`
	Const      *string           `json:"const"`
	AnyOf      []schema          `json:"anyOf"`
	Properties map[string]schema `json:"properties"`
	Defs       map[string]schema `json:"$defs"`
}

func readSchema(t *testing.T) schema {
	t.Helper()
	var root schema
	must(t, "values.schema.json", json.Unmarshal([]byte(read(t, chart+"/values.schema.json")), &root))
	return root
}

// resolve follows a reference to the schema's definitions.
func (s schema) resolve(root schema) schema {
	if s.Ref != "" {
		return root.Defs[strings.TrimPrefix(s.Ref, "#/$defs/")]
	}
	return s
}

// types returns the names of the types that a value may have, without null.
func (s schema) types(root schema) []string {
	s = s.resolve(root)
	var names []string
	switch of := s.Type.(type) {
	case string:
		names = append(names, of)
	case []any:
		for _, name := range of {
			names = append(names, name.(string))
		}
	}
	if s.Enum != nil || s.Const != nil {
		names = append(names, "string")
	}
	for _, alternative := range s.AnyOf {
		names = append(names, alternative.types(root)...)
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "null" })
}

func defaults(t *testing.T) map[string]any {
	t.Helper()
	var values map[string]any
	must(t, "values.yaml", yaml.Unmarshal([]byte(read(t, chart+"/values.yaml")), &values))
	return values
}

// TestValuesTableIsGenerated checks that the README's list has each value with its default and the first clause of its comment, and
// that the schema gives it a type. With UPDATE_REFERENCE=1 it writes the list.
func TestValuesTableIsGenerated(t *testing.T) {
	root, values := readSchema(t), defaults(t)
	list := ""
	for _, value := range documentedValues(t) {
		node, of := any(values), root
		for _, key := range strings.Split(value.path, ".") {
			node = node.(map[string]any)[key]
			of = of.resolve(root).Properties[key]
		}
		if len(of.types(root)) == 0 {
			t.Errorf("the schema gives %s no type", value.path)
		}
		text, err := json.Marshal(node)
		must(t, value.path, err)
		shown := " `" + string(text) + "`"
		if strings.Contains(`"" [] {} null`, string(text)) {
			shown = "" // unset
		}
		list += fmt.Sprintf("- `%s`%s: %s\n", value.path, shown, clauseEnd.Split(value.meaning, 2)[0])
	}
	path := chart + "/README.md"
	page := read(t, path)
	before, rest, hasBegin := strings.Cut(page, valuesBegin)
	_, after, hasEnd := strings.Cut(rest, valuesEnd)
	if !hasBegin || !hasEnd {
		t.Fatalf("%s has no place for the list", path)
	}
	generated := before + valuesBegin + "\n" + list + "\n" + valuesEnd + after
	if os.Getenv("UPDATE_REFERENCE") != "" {
		must(t, path, os.WriteFile(path, []byte(generated), 0o644))
	} else if page != generated {
		t.Errorf("%s is not what values.yaml and its schema declare: `make chart-reference` writes it again", path)
	}
}

// TestValuesAndSchemaHaveTheSameKeys checks that each value is documented and has a schema, and that the schema has no other.
func TestValuesAndSchemaHaveTheSameKeys(t *testing.T) {
	root := readSchema(t)
	documented := map[string]bool{}
	for _, value := range documentedValues(t) {
		documented[value.path] = true
	}
	var compare func(prefix string, values map[string]any, of schema)
	compare = func(prefix string, values map[string]any, of schema) {
		for _, key := range keysOf(of.Properties) {
			if _, found := values[key]; !found && prefix+key != "global" {
				t.Errorf("values.yaml has no %s", prefix+key)
			}
		}
		for _, key := range keysOf(values) {
			property, found := of.Properties[key]
			if !found {
				t.Errorf("values.schema.json has no %s", prefix+key)
				continue
			}
			inner, isMap := values[key].(map[string]any)
			if documented[prefix+key] {
				continue
			} else if !isMap {
				t.Errorf("values.yaml does not document %s", prefix+key)
				continue
			}
			compare(prefix+key+".", inner, property.resolve(root))
		}
	}
	compare("", defaults(t), root)
}
